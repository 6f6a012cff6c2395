"""``linear_scan`` on the CPU: values, gradients, refusals, and what torch.compile makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import linear_scan

OP = torch.ops.scan_registry
SHAPES = [((7,), 0), ((2, 3, 9), -1), ((2, 9, 3), 1), ((9, 2, 3), 0), ((2, 2, 4, 3, 2), -3)]
#: Largest error, relative to the largest value: half a unit in the last place of the output.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def inputs(
    *shape: int, dtype: torch.dtype = torch.float64, grad: bool = False
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    gates = 1 - torch.rand(*shape, generator=generator, dtype=torch.float64) ** 2
    tokens = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return gates.to(dtype).requires_grad_(grad), tokens.to(dtype).requires_grad_(grad)


def naive(gates: Tensor, tokens: Tensor, dim: int) -> Tensor:
    """The recurrence as the docstring has it, in float64, differentiable by torch."""
    x = torch.zeros_like(tokens.select(dim, 0), dtype=torch.float64)
    states = []
    for t in range(tokens.shape[dim]):
        x = gates.select(dim, t).double() * x + tokens.select(dim, t).double()
        states.append(x)
    return torch.stack(states, dim)


def transposed(tensor: Tensor) -> Tensor:
    """Equal values with the dimensions in the opposite order in memory."""
    dims = tuple(reversed(range(tensor.dim())))
    return (
        tensor.detach()
        .permute(dims)
        .contiguous()
        .permute(dims)
        .requires_grad_(tensor.requires_grad)
    )


# --- Values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("view", [lambda t: t, transposed], ids=["rows", "columns"])
def test_values_and_gradients(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, view: Callable[[Tensor], Tensor]
) -> None:
    gates, tokens = map(view, inputs(*shape, dtype=dtype, grad=True))
    states = linear_scan(gates, tokens, dim=dim)
    expected = naive(gates, tokens, dim)
    weight = torch.randn_like(expected).to(dtype)
    grads = torch.autograd.grad(states, (gates, tokens), weight)
    expected_grads = torch.autograd.grad(expected, (gates, tokens), weight.double())
    for out, ref in zip((states, *grads), (expected, *expected_grads), strict=True):
        assert (out.shape, out.dtype, out.device) == (tokens.shape, dtype, tokens.device)
        assert out.stride() == tokens.stride()
        # Gradients see the states after rounding, so their errors add up.
        assert (out.double() - ref.double()).abs().max() <= 4 * ROUNDING[
            dtype
        ] * ref.double().abs().max()


def test_the_state_is_float32_whatever_the_dtype() -> None:
    """In bfloat16 itself, counting by ones would end at 256."""
    ones = torch.ones(1000, dtype=torch.bfloat16)
    assert linear_scan(ones, ones)[-1] == torch.tensor(1000.0, dtype=torch.bfloat16)


def test_reference_is_what_the_cpu_runs() -> None:
    gates, tokens = inputs(2, 3, 9, dtype=torch.float32)
    auto = linear_scan(gates, tokens)
    assert torch.equal(auto, linear_scan(gates, tokens, backend="reference"))


def test_inputs_are_not_written() -> None:
    gates, tokens = inputs(2, 9, grad=True)
    before = gates.clone(), tokens.clone()
    linear_scan(gates, tokens).square().sum().backward()
    assert torch.equal(gates, before[0])
    assert torch.equal(tokens, before[1])


def test_views_of_every_kind() -> None:
    wide = inputs(4, 6, 10)
    for view in (
        lambda t: t[:, ::2],
        lambda t: t[..., 1:],
        lambda t: t[..., ::3],
        lambda t: t.transpose(0, 2),
        lambda t: t[:1].expand(5, -1, -1),
        lambda t: t[..., :1].expand(-1, -1, 7),
    ):
        gates, tokens = map(view, wide)
        for dim in range(3):
            torch.testing.assert_close(
                linear_scan(gates, tokens, dim=dim), naive(gates, tokens, dim)
            )


@pytest.mark.parametrize(("shape", "dim"), [((0,), 0), ((3, 0), 1), ((0, 3), 1), ((2, 0, 4), -1)])
def test_empty_tensors(shape: tuple[int, ...], dim: int) -> None:
    gates, tokens = (torch.empty(shape, requires_grad=True) for _ in range(2))
    states = linear_scan(gates, tokens, dim=dim)
    assert states.shape == shape
    states.sum().backward()
    assert gates.grad is not None
    assert tokens.grad is not None
    assert gates.grad.shape == tokens.grad.shape == shape


# --- Derivatives ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dim"), [((5,), 0), ((2, 4, 3), 1), ((2, 3, 4), -1), ((3, 1), 1)]
)
def test_first_and_second_derivatives(shape: tuple[int, ...], dim: int) -> None:
    both = inputs(*shape, grad=True)

    def function(gates: Tensor, tokens: Tensor) -> Tensor:
        return linear_scan(gates, tokens, dim=dim)

    assert torch.autograd.gradcheck(function, both)
    assert torch.autograd.gradgradcheck(function, both)


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_input_wants_a_gradient(wanted: int) -> None:
    both = inputs(2, 9)
    both[wanted].requires_grad_()
    (grad,) = torch.autograd.grad(linear_scan(*both).square().sum(), both[wanted])
    (expected,) = torch.autograd.grad(naive(*both, -1).square().sum(), both[wanted])
    torch.testing.assert_close(grad, expected)


def test_nothing_is_recorded_where_no_gradient_is_wanted() -> None:
    gates, tokens = inputs(2, 9, grad=True)
    assert linear_scan(*inputs(2, 9)).grad_fn is None
    with torch.no_grad():
        assert not linear_scan(gates, tokens).requires_grad
    with torch.inference_mode():
        assert linear_scan(gates, tokens).is_inference()


def test_the_gradient_of_a_sum_is_an_expanded_scalar() -> None:
    gates, tokens = inputs(2, 3, 9, grad=True)
    grads = torch.autograd.grad(linear_scan(gates, tokens).sum(), (gates, tokens))
    expected = torch.autograd.grad(naive(gates, tokens, -1).sum(), (gates, tokens))
    torch.testing.assert_close(grads, expected)


# --- Refusals ---------------------------------------------------------------------------------

FLOATS = torch.rand(2, 3, 4)


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize(
    ("gates", "tokens", "options", "error", "words"),
    [
        (None, FLOATS, {}, TypeError, ["gates", "torch.Tensor", "NoneType"]),
        (FLOATS, [1.0], {}, TypeError, ["tokens", "torch.Tensor", "list"]),
        (FLOATS.int(), FLOATS.int(), {}, TypeError, ["gates", "int32", "float32, bfloat16, float16"]),
        (FLOATS.to(torch.complex64), FLOATS.to(torch.complex64), {}, TypeError, ["gates", "complex64", "float64"]),
        (FLOATS, FLOATS.double(), {}, TypeError, ["tokens", "float64", "gates", "float32"]),
        (FLOATS, FLOATS[:1], {}, ValueError, ["tokens", "(1, 3, 4)", "gates", "(2, 3, 4)"]),
        (FLOATS, FLOATS.to("meta"), {}, ValueError, ["tokens is on meta", "gates on cpu"]),
        (FLOATS[0, 0, 0], FLOATS[0, 0, 0], {}, ValueError, ["gates", "scalar", "time dimension"]),
        (FLOATS, FLOATS, {"dim": 3}, ValueError, ["dim is 3", "-3 to 2"]),
        (FLOATS, FLOATS, {"dim": -4}, ValueError, ["dim is -4", "-3 to 2"]),
        (FLOATS, FLOATS, {"backend": "hip"}, ValueError, ["'hip'", "auto, cuda, triton, reference"]),
        (FLOATS, FLOATS, {"backend": "cuda"}, ValueError, ["'cuda'", "CUDA device", "gates is on cpu"]),
        (FLOATS, FLOATS, {"backend": "triton"}, ValueError, ["'triton'", "gates is on cpu"]),
    ],
)  # fmt: skip
def test_what_is_refused(
    gates: Any, tokens: Any, options: Any, error: type[Exception], words: list[str], grad: bool
) -> None:
    """The message names the argument, what was given and what is accepted."""
    if grad:
        gates, tokens = (
            t.detach().clone().requires_grad_()
            if torch.is_tensor(t) and t.is_floating_point()
            else t
            for t in (gates, tokens)
        )
    with pytest.raises(error) as caught:
        linear_scan(gates, tokens, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": "x"}, ["dim", "'x'"]),
        ({"dim": 1.5}, ["dim", "1.5"]),
        ({"dim": None}, ["dim", "None"]),
        ({"backend": None}, ["backend", "None"]),
        ({"backend": ["cuda"]}, ["backend", "cuda"]),
    ],
)
def test_options_of_the_wrong_type(options: Any, words: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        linear_scan(FLOATS, FLOATS, **options)
    for word in words:
        assert word in str(caught.value)


# --- The dispatcher and torch.compile ---------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dim", [1, -1])
def test_opcheck(grad: bool, dim: int) -> None:
    both = inputs(2, 3, 5, dtype=torch.float32, grad=grad)
    torch.library.opcheck(OP.linear_scan.default, (*both, dim, "auto"))


def test_opcheck_of_the_backward_pass() -> None:
    gates, states = inputs(2, 3, 5, dtype=torch.float32)
    tests = ("test_schema", "test_faketensor")
    args = (gates, states, torch.randn(2, 3, 5), 1, "auto")
    torch.library.opcheck(OP.linear_scan_backward.default, args, test_utils=tests)


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
        both = inputs(*shape, dtype=torch.float32, grad=True)
        states, expected = compiled(*both), function(*both)
        torch.testing.assert_close(states, expected)
        grads = torch.autograd.grad(states.square().sum(), both)
        torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), both))
    names = ["scan_registry.linear_scan.default", "scan_registry.linear_scan_backward.default"]
    assert called[:2] == names
    assert set(called) == set(names)


def test_compiled_refusals_are_the_same() -> None:
    compiled = torch.compile(linear_scan, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="dim is 3; a tensor of 3 dimensions accepts -3 to 2"):
        compiled(FLOATS, FLOATS, dim=3)


def test_meta_tensors_are_described_not_computed() -> None:
    meta = torch.empty(2, 3, 4, device="meta")
    assert linear_scan(meta, meta).is_meta


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="gates is sparse or nested; accepted are dense tensors"):
        linear_scan(torch.eye(3).to_sparse(), torch.eye(3))


def test_the_backward_operator_is_differentiable() -> None:
    inputs = [torch.rand(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    step = torch.ops.scan_registry.linear_scan_backward
    assert torch.autograd.gradcheck(lambda *tensors: step(*tensors, -1, "auto"), inputs)
