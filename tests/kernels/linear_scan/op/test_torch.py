"""``linear_scan`` among torch's own: the dispatcher, torch.compile, autocast, checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scan_registry import linear_scan

Function = Callable[..., Any]

OP = torch.ops.scan_registry.linear_scan.default
BACKWARD_OP = torch.ops.scan_registry.linear_scan_backward.default
NAMES = [str(OP), str(BACKWARD_OP)]


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


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


# --- The operators ----------------------------------------------------------------------------

#: Shapes of gates and initial state beside tokens of (2, 3, 5), bounds, dim, reverse, final.
CALLS = {
    "plain": ((2, 3, 5), None, None, -1, False, False),
    "columns": ((2, 3, 5), None, None, -2, False, True),
    "states": ((2, 3, 5), (3, 5), None, -3, True, True),
    "decay": ((3, 1), None, None, -1, True, False),
    "packed": ((1,), (2, 4, 5), (0, 0, 1, 1, 3), -2, False, True),
}


def arguments(name: str, grad: bool) -> list[Any]:
    of_gates, of_state, bounds, dim, reverse, final = CALLS[name]
    gates, tokens = inputs(2, 3, 5, gates=of_gates, grad=grad)
    state = None if of_state is None else torch.randn(of_state, requires_grad=grad)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    return [gates, tokens, state, cu_seqlens, dim, reverse, final, "auto"]


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str, grad: bool) -> None:
    """Schema, autograd, shapes without values, and the same again under torch.compile."""
    torch.library.opcheck(OP, tuple(arguments(name, grad)))


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck_of_the_backward_operator(name: str, wanted: tuple[bool, ...]) -> None:
    gates, states, state, bounds, dim, reverse, *_ = arguments(name, False)
    last_grad = None if state is None else torch.randn_like(state)
    args = (gates, states if wanted[0] else None, torch.randn(2, 3, 5), state, last_grad, bounds)
    options = (dim, reverse, "auto", [*wanted])
    torch.library.opcheck(
        BACKWARD_OP, (*args, *options), test_utils=("test_schema", "test_faketensor")
    )


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


@pytest.mark.parametrize("name", CALLS)
def test_the_function_is_the_operator(name: str) -> None:
    """Also where gradients go round the dispatcher: bit for bit."""
    args = arguments(name, True)
    tensors = [t for t in args[:3] if t is not None]
    *_, dim, reverse, final, _ = args
    options = {"dim": dim, "reverse": reverse, "return_final_state": final, "cu_seqlens": args[3]}
    found = linear_scan(*args[:3], **options)
    found = found if final else (found,)
    expected = OP(*args)[: len(found)]
    weights = [torch.randn_like(out) for out in found]
    grads = torch.autograd.grad(found, tensors, weights)
    expected_grads = torch.autograd.grad(expected, tensors, weights)
    for out, ref in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(out, ref)
        assert out.stride() == ref.stride()


def test_meta_tensors_are_described_not_computed() -> None:
    meta = torch.empty(2, 3, 4, device="meta")
    assert linear_scan(meta, meta).is_meta
    _, last = linear_scan(meta[0, :, :1], meta.half(), dim=1, return_final_state=True)
    assert (last.is_meta, last.shape, last.dtype) == (True, (2, 4), torch.float32)


def test_profilers_see_the_operators() -> None:
    both = inputs(2, 5, grad=True)
    with torch.profiler.profile() as profile:
        linear_scan(*both).sum().backward()
    seen = {event.key for event in profile.key_averages()}
    assert {"scan_registry::linear_scan", "scan_registry::linear_scan_backward"} <= seen


# --- Tensors that are more, or less, than their elements --------------------------------------


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

    seen: list[str] = []  # noqa: RUF012

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


def test_parameters() -> None:
    gates = torch.nn.Parameter(torch.rand(3, 1))
    tokens = torch.randn(2, 3, 5)
    linear_scan(gates, tokens).sum().backward()
    assert gates.grad is not None
    assert gates.grad.shape == (3, 1)


# --- torch.compile ----------------------------------------------------------------------------


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


def everything(gates: Tensor, tokens: Tensor, state: Tensor, bounds: Tensor) -> Any:
    """Every option of the operator, one after the other."""
    decay = gates[:, :1]
    states, last = linear_scan(decay, tokens, state[0], return_final_state=True)
    again = linear_scan(gates, states, dim=0, reverse=True)
    packed, ends = linear_scan(
        gates.bfloat16().float(), again, state.mT, cu_seqlens=bounds, return_final_state=True
    )
    return packed.square().mean() + ends.sin().sum() + last.sum(), packed


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_with_options(dynamic: bool) -> None:
    """No graph break, with the shapes' values in the graph or without; the same bits and gradients."""
    compiled = torch.compile(everything, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for time in (7, 9):
        tensors = [*inputs(3, time, grad=True), torch.randn(4, 3, requires_grad=True)]
        bounds = torch.tensor([0, 2, 2, 5, time], dtype=torch.int32)
        others = copies(tensors)
        loss, packed = compiled(*tensors, bounds)
        expected_loss, expected = everything(*others, bounds)
        torch.testing.assert_close((loss, packed), (expected_loss, expected))
        assert packed.stride() == expected.stride()
        loss.backward()
        expected_loss.backward()
        for found, ref in zip(tensors, others, strict=True):
            torch.testing.assert_close(found.grad, ref.grad)


def test_shapes_of_other_sizes_compile_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    compiler = CompileCounterWithBackend("aot_eager")
    function = torch.compile(linear_scan, fullgraph=True, dynamic=True, backend=compiler)
    for rows, time in ((2, 5), (3, 7), (4, 11)):
        gates, tokens = inputs(rows, time, gates=(rows, 1))
        assert torch.equal(function(gates, tokens), linear_scan(gates, tokens))
    assert compiler.frame_count == 1


def test_compiled_with_nothing_in_it() -> None:
    compiled = torch.compile(linear_scan, fullgraph=True, backend="aot_eager")
    for shape in ((2, 0), (0, 3)):
        gates, tokens = inputs(*shape, grad=True)
        states, last = compiled(gates, tokens, return_final_state=True)
        assert (states.shape, last.shape) == (shape, shape[:1])
        (states.sum() + last.sum()).backward()
        assert gates.grad is not None
        assert gates.grad.shape == shape


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


# --- Autocast and checkpointing ---------------------------------------------------------------


def test_autocast_leaves_dtypes_alone() -> None:
    """A recurrence is not what autocast is for: nothing is narrowed, nothing widened."""
    gates, tokens = inputs(2, 5, grad=True)
    expected = linear_scan(gates, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, last = linear_scan(gates, tokens, return_final_state=True)
        mixed = linear_scan(gates, tokens.bfloat16())
        grads = torch.autograd.grad(states.sum(), (gates, tokens), retain_graph=True)
    assert (states.dtype, last.dtype, mixed.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert torch.equal(states, expected)
    assert all(map(torch.equal, grads, torch.autograd.grad(states.sum(), (gates, tokens))))


def test_autocast_between_layers() -> None:
    """Projections in bfloat16, the scan in the dtype that it is given."""
    layer = torch.nn.Linear(4, 4)
    tokens = torch.randn(2, 6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = linear_scan(layer(tokens).sigmoid(), layer(tokens), dim=1)
        assert states.dtype == torch.bfloat16
        layer(states).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    """The same gradients, bit for bit, where the forward pass runs again."""
    args = arguments(name, True)
    bounds, dim, reverse = args[3:6]
    runs = 0

    def function(*tensors: Tensor) -> Any:
        nonlocal runs
        runs += 1
        options = {"dim": dim, "reverse": reverse, "cu_seqlens": bounds}
        states, last = linear_scan(*tensors, **options, return_final_state=True)
        return states.square(), last

    tensors = [t for t in args[:3] if t is not None]
    expected = torch.autograd.grad([out.sum() for out in function(*tensors)], tensors)
    outputs = checkpoint(function, *tensors, use_reentrant=reentrant)
    torch.autograd.backward([out.sum() for out in outputs])
    assert runs == 3
    assert all(torch.equal(t.grad, ref) for t, ref in zip(tensors, expected, strict=True))


@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms_are_all_there_is() -> None:
    """Nothing warns, raises or changes."""
    both = inputs(2, 3, 5, grad=True)
    weight = torch.randn(2, 3, 5)
    expected = torch.autograd.grad(linear_scan(*both, reverse=True), both, weight)
    torch.use_deterministic_algorithms(False)
    found = torch.autograd.grad(linear_scan(*both, reverse=True), both, weight)
    assert all(map(torch.equal, found, expected))


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
