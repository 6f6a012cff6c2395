"""``linear_scan`` on the CPU: values, dtypes, and what is refused in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from precision import ROUNDING, wide
from torch import Tensor

from scan_registry import linear_scan

Oracle = Callable[..., tuple[Tensor, Tensor]]

SHAPES = [((7,), 0), ((2, 3, 9), -1), ((2, 9, 3), 1), ((9, 2, 3), 0), ((2, 2, 4, 3, 2), -3)]


def inputs(
    *shape: int, dtype: torch.dtype = torch.float64, grad: bool = False
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    gates = 1 - torch.rand(*shape, generator=generator, dtype=torch.float64) ** 2
    tokens = torch.randn(*shape, generator=generator, dtype=wide(torch.empty(0, dtype=dtype)).dtype)
    return gates.to(dtype).requires_grad_(grad), tokens.to(dtype).requires_grad_(grad)


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


def assert_close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative to the largest value."""
    error = float((wide(out.detach()) - expected.detach()).abs().max())
    assert error <= tolerance * float(expected.detach().abs().max())


# --- Values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("view", [lambda t: t, transposed], ids=["rows", "columns"])
def test_values_and_gradients(
    plainly: Oracle,
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    view: Callable[[Tensor], Tensor],
) -> None:
    both = [view(t) for t in inputs(*shape, dtype=dtype, grad=True)]
    states = linear_scan(*both, dim=dim)
    copies = [wide(t.detach()).requires_grad_() for t in both]
    expected, _ = plainly(*copies, dim=dim)
    weight = torch.randn_like(expected).to(dtype)
    grads = torch.autograd.grad(states, both, weight)
    expected_grads = torch.autograd.grad(expected, copies, wide(weight))
    for out, ref in zip((states, *grads), (expected, *expected_grads), strict=True):
        assert (out.shape, out.dtype, out.device) == (shape, dtype, both[1].device)
        assert out.stride() == both[1].stride()
        # Gradients see the states after rounding, so their errors add up.
        assert_close(
            out, ref, (4 if dtype in (torch.bfloat16, torch.float16) else 16) * ROUNDING[dtype]
        )


def test_the_state_is_float32_whatever_the_dtype() -> None:
    """In bfloat16 itself, counting by ones would end at 256."""
    ones = torch.ones(1000, dtype=torch.bfloat16)
    assert linear_scan(ones, ones)[-1] == torch.tensor(1000.0, dtype=torch.bfloat16)
    _, last = linear_scan(ones, ones, return_final_state=True)
    assert last == torch.tensor(1000.0)
    following = linear_scan(ones[:1], ones[:1], torch.tensor(1002.5))
    assert following == torch.tensor(1003.5).bfloat16()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_reference_gives_the_same(dtype: torch.dtype) -> None:
    both = inputs(2, 3, 9, dtype=dtype, grad=True)
    weight = torch.randn(2, 3, 9).to(dtype)
    found = [
        (states, *torch.autograd.grad(states, both, weight))
        for states in (linear_scan(*both, backend=name) for name in ("auto", "reference"))  # type: ignore[arg-type]
    ]
    for out, ref in zip(*found, strict=True):
        assert_close(out, wide(ref), 4 * ROUNDING[dtype])


def test_inputs_are_not_written() -> None:
    gates, tokens = inputs(2, 9, grad=True)
    before = gates.clone(), tokens.clone()
    linear_scan(gates, tokens).square().sum().backward()
    assert torch.equal(gates, before[0])
    assert torch.equal(tokens, before[1])


def test_views_of_every_kind(plainly: Oracle) -> None:
    given = inputs(4, 6, 10)
    for view in (
        lambda t: t[:, ::2],
        lambda t: t[..., 1:],
        lambda t: t[..., ::3],
        lambda t: t.transpose(0, 2),
        lambda t: t[:1].expand(5, -1, -1),
        lambda t: t[..., :1].expand(-1, -1, 7),
    ):
        gates, tokens = map(view, given)
        for dim in range(3):
            torch.testing.assert_close(
                linear_scan(gates, tokens, dim=dim), plainly(gates, tokens, dim=dim)[0]
            )


def test_a_scan_in_reverse_is_that_of_what_is_reversed() -> None:
    gates, tokens = inputs(2, 9, 3)
    for dim in range(3):
        forwards = linear_scan(gates.flip(dim), tokens.flip(dim), dim=dim).flip(dim)
        torch.testing.assert_close(linear_scan(gates, tokens, dim=dim, reverse=True), forwards)


def test_the_final_state_is_the_last_to_be_computed() -> None:
    gates, tokens = inputs(2, 9, 3)
    states, last = linear_scan(gates, tokens, dim=1, return_final_state=True)
    assert torch.equal(last, states[:, -1])
    states, last = linear_scan(gates, tokens, dim=1, reverse=True, return_final_state=True)
    assert torch.equal(last, states[:, 0])


def test_nothing_is_recorded_where_no_gradient_is_wanted() -> None:
    gates, tokens = inputs(2, 9, grad=True)
    assert linear_scan(*inputs(2, 9)).grad_fn is None
    for options in ({}, {"reverse": True}):
        with torch.no_grad():
            assert not linear_scan(gates, tokens, **options).requires_grad
        with torch.inference_mode():
            assert linear_scan(gates, tokens, **options).is_inference()


def test_the_gradient_of_a_sum_is_an_expanded_scalar(plainly: Oracle) -> None:
    gates, tokens = inputs(2, 3, 9, grad=True)
    expected = torch.autograd.grad(plainly(gates, tokens)[0].sum(), (gates, tokens))
    for options in ({}, {"initial_state": torch.zeros(())}):
        grads = torch.autograd.grad(linear_scan(gates, tokens, **options).sum(), (gates, tokens))
        torch.testing.assert_close(grads, expected)


# --- Refusals ---------------------------------------------------------------------------------

FLOATS = torch.rand(2, 3, 4)
ACCEPTED = "accepted are float32, bfloat16, float16, float64, complex64, complex128"


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("extra", [{}, {"reverse": True}], ids=["plain", "options"])
@pytest.mark.parametrize(
    ("gates", "tokens", "options", "error", "words"),
    [
        (None, FLOATS, {}, TypeError, ["gates must be a torch.Tensor, not NoneType"]),
        (FLOATS, [1.0], {}, TypeError, ["tokens must be a torch.Tensor, not list"]),
        (FLOATS.int(), FLOATS.int(), {}, TypeError, ["gates has dtype torch.int32", ACCEPTED]),
        (FLOATS, FLOATS > 0, {}, TypeError, ["tokens has dtype torch.bool", ACCEPTED]),
        (FLOATS, FLOATS.to(torch.float8_e5m2), {}, TypeError, ["tokens has dtype torch.float8_e5m2"]),
        (FLOATS, FLOATS.double(), {}, TypeError, ["gates have dtype torch.float32, tokens torch.float64"]),
        (FLOATS, FLOATS[:, :2], {}, ValueError, ["gates have shape (2, 3, 4), tokens (2, 2, 4)", "broadcast"]),
        (FLOATS, FLOATS.to("meta"), {}, ValueError, ["gates is on cpu, tokens on meta", "one device"]),
        (FLOATS[0, 0, 0], FLOATS[0, 0, 0], {}, ValueError, ["scalars", "time dimension"]),
        (FLOATS, FLOATS, {"dim": 3}, ValueError, ["dim is 3; tensors of 3 dimensions accept -3 to 2"]),
        (FLOATS, FLOATS, {"dim": -4}, ValueError, ["dim is -4", "-3 to 2"]),
        (FLOATS, FLOATS[0], {"dim": -4}, ValueError, ["dim is -4", "-3 to 2"]),
        (FLOATS, FLOATS, {"backend": "hip"}, ValueError, ["backend is 'hip'; accepted are auto, cuda, triton, reference"]),
        (FLOATS, FLOATS, {"backend": "cuda"}, ValueError, ["'cuda', which needs a CUDA device; tokens are on cpu"]),
        (FLOATS, FLOATS, {"backend": "triton"}, ValueError, ["'triton', which needs a CUDA device"]),
    ],
)  # fmt: skip
def test_what_is_refused(
    gates: Any,
    tokens: Any,
    options: Any,
    error: type[Exception],
    words: list[str],
    extra: dict[str, Any],
    grad: bool,
) -> None:
    """The message names the argument, what was given and what is accepted, on every way through."""
    if grad:
        gates, tokens = (
            t.detach().clone().requires_grad_()
            if torch.is_tensor(t) and t.is_floating_point()
            else t
            for t in (gates, tokens)
        )
    with pytest.raises(error) as caught:
        linear_scan(gates, tokens, **options, **extra)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": "x"}, ["dim is 'x'; it must be an int"]),
        ({"dim": True}, ["dim is True; it must be an int"]),
        ({"dim": 1.5}, ["dim is 1.5"]),
        ({"dim": None}, ["dim is None"]),
        ({"dim": [1]}, ["dim is [1]"]),
        ({"backend": None}, ["backend is None"]),
        ({"backend": ["cuda"]}, ["backend is ['cuda']"]),
        ({"reverse": 1}, ["reverse is 1; it must be a bool"]),
        ({"reverse": None}, ["reverse is None; it must be a bool"]),
        ({"return_final_state": 0}, ["return_final_state is 0; it must be a bool"]),
        ({"return_final_state": "yes"}, ["return_final_state is 'yes'"]),
    ],
)
def test_options_of_the_wrong_type(options: Any, words: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        linear_scan(FLOATS, FLOATS, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("state", "options", "error", "words"),
    [
        (1.0, {}, TypeError, "initial_state must be a torch.Tensor, not float"),
        (torch.zeros(3, 2), {}, ValueError, r"initial_state has shape \(3, 2\); .* state's shape, \(2, 3\)"),
        (torch.zeros(1, 2, 3), {}, ValueError, r"shape \(1, 2, 3\); .* \(2, 3\)"),
        (torch.zeros(2, 3), {"dim": 0}, ValueError, r"shape \(2, 3\); .* \(3, 4\)"),
        (torch.zeros(2, 3), {"cu_seqlens": torch.tensor([0, 1, 2, 3, 4])}, ValueError, r"\(2, 3\); .* \(2, 3, 4\)"),
        (torch.zeros(2, 3, device="meta"), {}, ValueError, "initial_state is on meta, tokens on cpu"),
        (torch.zeros(2, 3).to_sparse(), {}, TypeError, "initial_state is sparse; accepted are dense"),
    ],
)  # fmt: skip
def test_initial_states_that_are_refused(
    state: Any, options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        linear_scan(FLOATS, FLOATS, state, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_tensors_that_are_not_dense_are_refused_with_what_to_pass_instead() -> None:
    dense = torch.eye(3)
    nested = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])
    for options in ({}, {"reverse": True}):
        for other, kind in (
            (dense.to_sparse(), "sparse; accepted are dense tensors, so pass {}.to_dense()"),
            (dense.to_mkldnn(), "in oneDNN's layout; .* so pass {}.to_dense()"),
            (nested, r"nested; .* so pass {}.to_padded_tensor\(0.0\)"),
        ):
            with pytest.raises(TypeError, match=f"gates is {kind.format('gates')}"):
                linear_scan(other, dense, **options)
            with pytest.raises(TypeError, match=f"tokens is {kind.format('tokens')}"):
                linear_scan(dense, other, **options)


def test_what_is_said_of_jagged_tensors_computes_their_scan() -> None:
    parts = [torch.rand(4, 3), torch.rand(0, 3), torch.rand(5, 3)]
    gates = torch.nested.nested_tensor(parts, layout=torch.jagged)
    tokens = torch.nested.nested_tensor([part + 1 for part in parts], layout=torch.jagged)
    with pytest.raises(TypeError, match="gates is jagged; accepted are dense tensors") as caught:
        linear_scan(gates, tokens)
    assert "pass gates.values() with dim=0 and cu_seqlens=gates.offsets()" in str(caught.value)
    states = linear_scan(gates.values(), tokens.values(), dim=0, cu_seqlens=gates.offsets())
    for part, found in zip(parts, states.split([4, 0, 5]), strict=True):
        torch.testing.assert_close(found, linear_scan(part, part + 1, dim=0))


# --- Bounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True], ids=["function", "operator"])
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([0, 5, 3, 9], "falls somewhere"),
        ([0, -1, 9], "falls somewhere"),
        ([9, 0], "falls somewhere"),
        ([1, 9], "runs from 1 to 9"),
        ([0, 8], "runs from 0 to 8"),
        ([0, 10], "runs from 0 to 10"),
        ([-1, 9], "runs from -1 to 9"),
        ([0, 0], "runs from 0 to 0"),
        ([0, 2**40], "runs from 0 to 1099511627776"),
        ([-(2**63), 2**63 - 1], "runs from -9223372036854775808 to 9223372036854775807"),
        ([0, 2**62 + 1, -(2**62), 9], "falls somewhere"),  # differences of which overflow
    ],
)
def test_values_of_bounds(bounds: list[int], words: str, grad: bool, direct: bool) -> None:
    """Nothing runs over wrong ones, not even where the operator itself is called with them."""
    tokens = torch.randn(9, 2, requires_grad=grad)
    cu_seqlens = torch.tensor(bounds)
    if direct:
        args = (torch.rand(9, 2), tokens, None, cu_seqlens, -2, False, False, "auto")
        with pytest.raises(ValueError, match="do not rise from 0 to time, 9"):
            torch.ops.scan_registry.linear_scan(*args)
        return
    whole = f"cu_seqlens {words}; it must rise from 0 to the 9 steps of the time dimension"
    with pytest.raises(ValueError, match=whole):
        linear_scan(torch.rand(9, 2), tokens, dim=0, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("bounds", "error", "words"),
    [
        ([0, 9], TypeError, "cu_seqlens must be a torch.Tensor, not list"),
        (torch.tensor([0.0, 9.0]), TypeError, "cu_seqlens has dtype torch.float32; accepted are int32 and int64"),
        (torch.tensor([0, 9], dtype=torch.int16), TypeError, "dtype torch.int16"),
        (torch.tensor([0]), ValueError, r"cu_seqlens has shape \(1,\); it must be \(sequences \+ 1,\)"),
        (torch.tensor([], dtype=torch.int64), ValueError, r"cu_seqlens has shape \(0,\)"),
        (torch.tensor(9), ValueError, r"cu_seqlens has shape \(\)"),
        (torch.tensor([[0, 9]]), ValueError, r"cu_seqlens has shape \(1, 2\)"),
        (torch.tensor([0, 9], device="meta"), ValueError, "cu_seqlens is on meta, tokens on cpu"),
        (torch.tensor([0, 9]).to_sparse(), TypeError, "cu_seqlens is sparse; accepted are dense"),
    ],
)  # fmt: skip
def test_bounds_that_are_none(bounds: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        linear_scan(torch.rand(9, 2), torch.rand(9, 2), dim=0, cu_seqlens=bounds)


def test_bounds_with_gaps_in_memory() -> None:
    cu_seqlens = torch.tensor([0, 7, 3, 8, 9, 9], dtype=torch.int64)[::2]
    gates, tokens = torch.rand(2, 9), torch.randn(2, 9)
    found = linear_scan(gates, tokens, cu_seqlens=cu_seqlens)
    assert torch.equal(found, linear_scan(gates, tokens, cu_seqlens=cu_seqlens.contiguous()))
    negated = torch.ops.scan_registry.linear_scan  # which takes them as kernels do
    with pytest.raises(TypeError, match="operator takes int64 of one dimension, without gaps"):
        negated(gates, tokens, None, cu_seqlens, -1, False, False, "auto")


def test_a_dim_is_an_int_whatever_was_called_before() -> None:
    tokens = torch.randn(2, 3)
    linear_scan(tokens, tokens, dim=1)
    for dim in (1.0, True + 0.0):
        with pytest.raises(TypeError, match=r"dim is 1\.0; it must be an int"):
            linear_scan(tokens, tokens, dim=dim)  # type: ignore[call-overload]


def test_the_operators_of_torch_refuse_what_kernels_would_overrun() -> None:
    forward = torch.ops.scan_registry.linear_scan
    backward = torch.ops.scan_registry.linear_scan_backward
    small, wide = torch.rand(1, 8), torch.rand(2, 8)
    how = None, None, None, -1, False, "auto", [True, True, False]
    with pytest.raises(ValueError, match="shapes"):
        backward(wide, wide, small, *how)
    with pytest.raises(ValueError, match="dtypes"):
        backward(wide, wide, wide.bfloat16(), *how)
    with pytest.raises(ValueError, match="do not broadcast"):
        forward(wide, small, None, None, -1, False, False, "auto")
