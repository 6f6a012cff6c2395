"""``linear_scan`` among torch's own: lazy tensors, subclasses, torch.compile, export, and higher derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from recurrence import plainly
from torch import Tensor

from scan_registry import linear_scan

Function = Callable[..., Any]

OP = torch.ops.scan_registry.linear_scan.default
BACKWARD_OP = torch.ops.scan_registry.linear_scan_backward.default
NAMES = [str(OP), str(BACKWARD_OP)]
REAL = torch.float64


def inputs(
    *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False, gates: Any = None
) -> list[Tensor]:
    """Gates, of another shape if that is given, and tokens."""
    generator = torch.Generator().manual_seed(sum(shape))
    drawn = [
        torch.rand(gates or shape, generator=generator),
        torch.randn(shape, generator=generator),
    ]
    return [t.to(dtype).requires_grad_(grad) for t in drawn]


@pytest.mark.parametrize(
    "view",
    [lambda t: t[..., ::2], lambda t: t[..., 1:6], lambda t: t.mT],
    ids=["sliced", "shifted", "transposed"],
)
@pytest.mark.parametrize("of_gates", [(2, 5, 5), (5, 1), (1,)], ids=str)
def test_the_backward_operator_takes_any_strides(
    of_gates: tuple[int, ...], view: Callable[[Tensor], Tensor]
) -> None:
    """Compilers may lay out states and their gradients as they like."""
    gates = torch.rand(of_gates)
    states, grad = view(torch.randn(2, 5, 10)), view(torch.randn(2, 5, 10))
    if states.shape != (2, 5, 5):
        states, grad = states[:, :5], grad[:, :5]
    others = None, torch.randn(2, 5), None, -1, False, "auto", [True, True, True]
    expected = BACKWARD_OP(gates, states.clone(), grad.contiguous(), *others)
    for given in ((states, grad), (states, grad.contiguous()), (states.contiguous(), grad)):
        torch.testing.assert_close(BACKWARD_OP(gates, *given, *others), expected)


def test_profilers_see_the_operators() -> None:
    both = inputs(2, 5, grad=True)
    with torch.profiler.profile() as profile:
        linear_scan(*both).sum().backward()
    seen = {event.key for event in profile.key_averages()}
    assert {"scan_registry::linear_scan", "scan_registry::linear_scan_backward"} <= seen


@pytest.mark.parametrize(
    "lazy",
    [
        lambda t: t.conj(),
        lambda t: t.conj().imag.to(torch.complex64),  # negative
        lambda t: t.conj().imag.neg().conj(),
        lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    ],
    ids=["conjugated", "negated", "neither", "zero"],
)
def test_lazy_tensors(lazy: Callable[[Tensor], Tensor]) -> None:
    base = torch.randn(2, 5, dtype=torch.complex64)
    tensor = lazy(base)
    plain = tensor.clone().resolve_conj().resolve_neg() + 0
    other = torch.rand(2, 5).to(tensor.dtype)
    for options in ({}, {"reverse": True}):
        assert torch.equal(
            linear_scan(tensor, other, **options), linear_scan(plain, other, **options)
        )
        assert torch.equal(
            linear_scan(other, tensor, **options), linear_scan(other, plain, **options)
        )
    gates, tokens = other.clone().requires_grad_(), other.clone().requires_grad_()
    states = linear_scan(gates, tokens)
    found = torch.autograd.grad(states, (gates, tokens), tensor, retain_graph=True)
    expected = torch.autograd.grad(states, (gates, tokens), plain)
    assert all(map(torch.equal, found, expected))


class Wrapper(Tensor):
    """A subclass that counts the functions that it is given to."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_are_kept() -> None:
    gates, tokens = inputs(2, 5)
    found = linear_scan(gates.as_subclass(Wrapper), tokens)
    assert type(found) is Wrapper
    assert torch.equal(found.as_subclass(Tensor), linear_scan(gates, tokens))
    assert any("linear_scan" in name for name in Wrapper.seen)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled_without_a_graph_break() -> None:
    """Forward and backward give the same, and each is one call of this package's operator."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
    from torch.fx import GraphModule

    called: list[str] = []

    def spy(graph: GraphModule, _: Any) -> Any:
        called.extend(str(n.target) for n in graph.graph.nodes if "scan_registry" in str(n.target))
        return make_boxed_func(graph.forward)

    def function(gates: Tensor, tokens: Tensor) -> Tensor:
        return linear_scan(gates.sigmoid(), tokens, dim=1) * 2

    compiled = torch.compile(
        function, fullgraph=True, backend=aot_autograd(fw_compiler=spy, bw_compiler=spy)
    )
    for shape in ((2, 9, 3), (4, 5, 6)):
        both = inputs(*shape, grad=True)
        states, expected = compiled(*both), function(*both)
        torch.testing.assert_close(states, expected)
        grads = torch.autograd.grad(states.square().sum(), both)
        torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), both))
    assert called[:2] == NAMES
    assert set(called) == set(NAMES)


def test_shapes_of_other_sizes_compile_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    compiler = CompileCounterWithBackend("aot_eager")
    function = torch.compile(linear_scan, fullgraph=True, dynamic=True, backend=compiler)
    for rows, time in ((2, 5), (3, 7), (4, 11)):
        gates, tokens = inputs(rows, time, gates=(rows, 1))
        assert torch.equal(function(gates, tokens), linear_scan(gates, tokens))
    assert compiler.frame_count == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": 3}, "dim is 3; tensors of 3 dimensions accept -3 to 2"),
        ({"backend": "cuda"}, "backend is 'cuda', which needs a CUDA device"),
        ({"reverse": 1}, "reverse is 1; it must be a bool"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "do not rise from 0 to time, 4"),  # when it runs
    ],
)
def test_compiled_refusals_are_the_same(options: Any, words: str) -> None:
    floats = torch.rand(2, 3, 4)
    compiled = torch.compile(linear_scan, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=words):
        compiled(floats, floats, **options)


def test_exported() -> None:
    """A program of one operator, for every length of time."""

    class Scan(torch.nn.Module):
        def forward(self, gates: Tensor, tokens: Tensor) -> Any:
            return linear_scan(gates, tokens, reverse=True, return_final_state=True)

    time = torch.export.Dim("time", min=2, max=1000)
    both = tuple(inputs(3, 8))
    program = torch.export.export(Scan(), both, dynamic_shapes=({1: time}, {1: time}))
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert calls.count(NAMES[0]) == 1
    longer = tuple(inputs(3, 13))
    for found, ref in zip(program.module()(*longer), Scan()(*longer), strict=True):
        assert torch.equal(found, ref)


def test_traced_by_make_fx() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gates, tokens = inputs(3, 5)

    def step(gates: Tensor, tokens: Tensor) -> Tensor:
        gates = gates.detach().requires_grad_()
        return torch.autograd.grad(linear_scan(gates, tokens).sum(), gates)[0]

    graph = make_fx(step)(gates, tokens)
    targets = {str(node.target) for node in graph.graph.nodes}
    assert set(NAMES) <= targets
    torch.testing.assert_close(graph(gates, tokens), step(gates, tokens))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_compiled_states_lie_as_they_are_promised_to(backend: Any) -> None:
    """Also those of the reference, and of tensors whose first dimension is not the outermost."""

    def scan(gates: Tensor, tokens: Tensor, state: Tensor) -> Any:
        return linear_scan(gates, tokens, state, return_final_state=True, backend=backend)

    tensors = [torch.rand(3, 4, 5).permute(1, 0, 2).requires_grad_() for _ in range(2)]
    tensors.append(torch.rand(4, 3, requires_grad=True))
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(*tensors), scan(*tensors), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
    torch.library.opcheck(OP, (*tensors, None, -1, False, True, backend))


def disc(*shape: int) -> Tensor:
    """Random gates of |gate| ≤ 1."""
    return 1.8 * torch.rand(shape, dtype=REAL) - 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_tangents_have_the_dtypes_of_outputs(dtype: torch.dtype) -> None:
    gates = torch.rand(2, 5).to(dtype)
    pair = (gates, gates)

    def function(*inputs: Tensor) -> Any:
        return linear_scan(*inputs, return_final_state=True)

    outputs, tangents = torch.func.jvp(function, pair, pair)
    assert [t.dtype for t in tangents] == [out.dtype for out in outputs]
    exact = [t.to(torch.complex128 if dtype.is_complex else REAL) for t in pair]
    expected = torch.func.jvp(function, tuple(exact), tuple(exact))[1]
    for found, ref in zip(tangents, expected, strict=True):
        torch.testing.assert_close(found.to(ref.dtype), ref, rtol=2e-2, atol=2e-2)


def test_derivatives_of_every_order() -> None:
    """The fourth, each transform over the ones before it."""
    tokens = torch.randn(6, dtype=REAL)
    grad, jacfwd, jacrev = torch.func.grad, torch.func.jacfwd, torch.func.jacrev
    for transforms in ((grad, grad, grad, grad), (jacfwd, jacrev, jacfwd, grad)):
        found: Function = lambda x: linear_scan(x, tokens).square().sum()  # noqa: E731
        expected: Function = lambda x: plainly(x, tokens)[0].square().sum()  # noqa: E731
        for transform in reversed(transforms):
            found, expected = transform(found), transform(expected)
        decay = torch.tensor(0.7, dtype=REAL)
        torch.testing.assert_close(found(decay), expected(decay))


def test_vmap_with_bounds_that_all_share() -> None:
    bounds = torch.tensor([[0, 2, 5], [0, 3, 5]])
    tokens = torch.randn(5, dtype=REAL)
    together = torch.func.vmap(lambda t: linear_scan(t, t, cu_seqlens=bounds[0]))
    assert together(tokens.expand(3, 5)).shape == (3, 5)
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 4"):
        torch.func.vmap(lambda t: linear_scan(t, t, cu_seqlens=torch.tensor([0, 4])))(
            tokens.expand(3, 5)
        )


def test_one_graph_is_walked_by_several_threads() -> None:
    gates, tokens = (t.requires_grad_() for t in (disc(4, 64), torch.randn(4, 64, dtype=REAL)))
    states, weight = linear_scan(gates, tokens), torch.randn(4, 64, dtype=REAL)
    expected = torch.autograd.grad(states, (gates, tokens), weight, retain_graph=True)
    with ThreadPoolExecutor(4) as pool:
        walks = [
            pool.submit(torch.autograd.grad, states, (gates, tokens), weight, retain_graph=True)
            for _ in range(400)
        ]
    for walk in walks:
        torch.testing.assert_close(walk.result(), expected, rtol=0, atol=0)


def test_a_backward_pass_that_failed_fails_alike_again() -> None:
    gates, tokens = disc(2, 4), torch.randn(2, 4, dtype=REAL, requires_grad=True)
    states = linear_scan(gates.requires_grad_(), tokens)
    with torch.no_grad():
        gates.zero_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            states.sum().backward(retain_graph=True)
