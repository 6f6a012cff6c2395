"""``causal_conv1d`` on the CPU, against a loop over steps in float64; derivatives, and torch.compile."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import causal_conv1d, causal_conv1d_update, explain
from scan_registry.kernels.causal_conv1d.op.function import describe
from scan_registry.kernels.causal_conv1d.op.operator import OPERATOR
from scan_registry.kernels.causal_conv1d.reference import compute_dtype

OP = torch.ops.scan_registry.causal_conv1d.default
BACKWARD_OP = torch.ops.scan_registry.causal_conv1d_backward.default
UPDATE_OP = torch.ops.scan_registry.causal_conv1d_update.default

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-12}


def one_sequence(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """Of inputs (channels, time) after those of the state: step by step."""
    steps = []
    for t in range(x.shape[1]):
        state = torch.cat([state, x[:, t : t + 1]], 1)
        y = (weight * state).sum(1) + (0 if bias is None else bias)
        steps.append(y * y.sigmoid() if silu else y)
        state = state[:, 1:]
    return torch.stack(steps, 1) if steps else x, state


def plainly(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """What the docstring says, in operators that torch differentiates. Shares no code with the package."""
    silu, width, channels = activation is not None, weight.shape[1], x.shape[1]
    zeros = x.new_zeros(channels, width - 1)
    lines, ends = [], []
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        for n, (begin, end) in enumerate(pairwise(bounds)):
            state = zeros if initial_state is None else initial_state[n]
            y, last = one_sequence(x[0][:, begin:end], weight, bias, state, silu)
            lines.append(y)
            ends.append(last)
        return torch.cat(lines, 1).unsqueeze(0), torch.stack(ends)
    for b in range(x.shape[0]):
        state = zeros if initial_state is None else initial_state[b]
        if seq_idx is None:
            y, last = one_sequence(x[b], weight, bias, state, silu)
        else:
            numbers, parts, begin = seq_idx[b].tolist(), [], 0
            for t in range(1, len(numbers) + 1):
                if t < len(numbers) and numbers[t] == numbers[t - 1]:
                    continue
                y, last = one_sequence(x[b][:, begin:t], weight, bias, state, silu)
                parts.append(y * (0 if numbers[begin] < 0 else 1))
                state, begin = zeros, t
            y = torch.cat(parts, 1)
        lines.append(y)
        ends.append(last)
    return torch.stack(lines), torch.stack(ends)


def drawn(
    batch: int,
    channels: int,
    time: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    **which: Any,
) -> dict[str, Any]:
    """Arguments: those of ``which`` that are true are drawn, others passed on."""
    narrow = torch.float64 if dtype == torch.float64 else torch.float32
    given: dict[str, Any] = {
        "x": torch.randn(batch, channels, time).to(dtype),
        "weight": torch.randn(channels, width, dtype=narrow) / width**0.5,
        "activation": which.get("activation"),
    }
    rows = batch
    if which.get("bias"):
        given["bias"] = torch.randn(channels, dtype=narrow)
    if which.get("sequences"):
        rows = which["sequences"]
        inner = torch.randint(0, time + 1, (rows - 1,)).sort().values
        given["cu_seqlens"] = torch.cat([torch.tensor([0]), inner, torch.tensor([time])])
    if which.get("indexed"):
        given["seq_idx"] = (torch.rand(batch, time) < 0.3).cumsum(1) - 1
    if which.get("state"):
        given["initial_state"] = torch.randn(rows, channels, width - 1).to(dtype)
    if which.get("columns"):
        given["x"] = given["x"].transpose(1, 2).contiguous().transpose(1, 2)
    return given


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True, "activation": "swish"},
    "state": {"bias": True, "state": True, "activation": "silu"},
    "columns": {"bias": True, "state": True, "columns": True},
    "packed": {"sequences": 4, "bias": True, "activation": "silu"},
    "packed states": {"sequences": 5, "state": True},
    "indexed": {"indexed": True, "bias": True, "activation": "silu"},
    "indexed states": {"indexed": True, "state": True, "columns": True},
}


def differentiable(given: dict[str, Any]) -> dict[str, Tensor]:
    names = ("x", "weight", "bias", "initial_state")
    return {name: given[name].requires_grad_() for name in names if name in given}


def wide(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: t.detach().double() if isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in given.items()
    }


def distance(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    size = max(float(expected.detach().norm()), expected.numel() ** 0.5 * 0.1)
    return float((found.double() - expected).norm()) / size / TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    [
        # Each pair of two of them.
        (name, width, [*TOLERANCE][(n + w) % len(TOLERANCE)])
        for n, name in enumerate(CALLS)
        for w, width in enumerate((2, 3, 4, 8))
    ],
    ids=str,
)
def test_it_is_the_loop_over_steps(name: str, width: int, dtype: torch.dtype) -> None:
    """Outputs, final states and every gradient."""
    for channels, time in ((1, 1), (5, 2), (3, 37), (6, 8)):
        batch = 1 if "packed" in name else 2
        given = drawn(batch, channels, time, width, dtype, **CALLS[name])
        leaves = differentiable(given)
        found = causal_conv1d(**given, return_final_state=True)
        exact = wide(given)
        expected = plainly(**{n: t for n, t in exact.items() if n not in leaves}, **(of := {
            n: exact[n].requires_grad_() for n in leaves
        }))  # fmt: skip
        weights = [torch.randn_like(t) for t in found]
        grads = torch.autograd.grad(found, [*leaves.values()], weights)
        expected_grads = torch.autograd.grad(
            expected, [*of.values()], [w.double() for w in weights]
        )
        assert found[0].dtype == found[1].dtype == dtype
        assert found[0].stride() == torch.empty_like(given["x"]).stride()
        for one, other in zip((*found, *grads), (*expected, *expected_grads), strict=True):
            assert one.shape == other.shape
            assert distance(one, other, dtype) <= 1
        assert [g.dtype for g in grads] == [t.dtype for t in leaves.values()]


@pytest.mark.parametrize("name", CALLS)
def test_derivatives_of_any_order(name: str) -> None:
    given = drawn(1, 2, 6, 3, torch.float64, **CALLS[name])
    leaves = differentiable(given)

    def called(*tensors: Tensor) -> Any:
        replaced = dict(zip(leaves, tensors, strict=True))
        return causal_conv1d(**{**given, **replaced}, return_final_state=True)

    given_leaves = tuple(leaves.values())
    assert torch.autograd.gradcheck(called, given_leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(called, given_leaves, fast_mode=True)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    given = drawn(1, 3, 7, 4, **CALLS[name])
    for grad in (False, True):
        if grad:
            differentiable(given)
        names = ("x", "weight", "bias", "initial_state", "seq_idx", "cu_seqlens")
        tensors = [given.get(each) for each in names]
        if tensors[4] is not None:
            tensors[4] = tensors[4].int()
        torch.library.opcheck(OP, (*tensors, given["activation"] is not None, True, "auto"))
    last = torch.randn(len(given.get("cu_seqlens", [0, 1])) - 1, 3, 3)
    tensors = [t if t is None else t.detach() for t in tensors]
    for wanted in ([True] * 4, [True, False, False, False], [False, True, False, True]):
        args = (*tensors, torch.randn(1, 3, 7), last, True, "auto", wanted)
        torch.library.opcheck(BACKWARD_OP, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("time", [1, 3], ids=["one", "several"])
def test_opcheck_of_the_update(time: int) -> None:
    x, state = torch.randn(2, 3, time), torch.randn(2, 3, 5)
    weight, positions = torch.randn(3, 4), torch.tensor([3, 7], dtype=torch.int32)
    torch.library.opcheck(UPDATE_OP, (x, state, weight, None, positions, None, True, "auto"))


@pytest.mark.parametrize("name", ["state", "columns", "packed states", "indexed"])
def test_compiled_as_a_whole(name: str) -> None:
    given = drawn(1, 3, 11, 4, **CALLS[name])
    leaves = differentiable(given)

    def called(**arguments: Any) -> Any:
        y, last = causal_conv1d(**arguments, return_final_state=True)
        return (y * 2).sum() + (last**2).sum()

    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(compiled(**given), [*leaves.values()])
    expected = torch.autograd.grad(called(**given), [*leaves.values()])
    torch.testing.assert_close(grads, expected)


def test_the_update_compiled_as_a_whole() -> None:
    x, state, weight = torch.randn(2, 3), torch.randn(2, 3, 3), torch.randn(3, 4)
    compiled = torch.compile(causal_conv1d_update, fullgraph=True, backend="aot_eager")
    one, other = state.clone(), state.clone()
    torch.testing.assert_close(compiled(x, one, weight), causal_conv1d_update(x, other, weight))
    assert torch.equal(one, other)
    assert not torch.equal(one, state)


def test_mapped_and_transformed() -> None:
    x, weight = torch.randn(4, 2, 3, 9), torch.randn(3, 4)

    def called(x: Tensor) -> Tensor:
        return causal_conv1d(x, weight, activation="silu")

    expected = torch.stack([called(each) for each in x])
    torch.testing.assert_close(torch.vmap(called)(x), expected)
    jacobian = torch.func.jacrev(called)(x[0][:1])
    torch.testing.assert_close(torch.func.jacfwd(called)(x[0][:1]), jacobian)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 9])
@pytest.mark.parametrize(("width", "length"), [(4, 3), (3, 6), (8, 7)])
def test_updates_continue_a_sequence(
    width: int, length: int, steps: int, rows: bool, ring: bool
) -> None:
    """Whatever holds the state, all steps together are those of the whole sequence."""
    batch, channels, time = 3, 5, 18
    given = drawn(batch, channels, time, width, bias=True, activation="silu")
    expected = causal_conv1d(**given)
    x, filters = given["x"], (given["weight"], given["bias"], "silu")
    slots = 6 if rows else batch
    state = torch.zeros(slots, channels, length)
    indices = torch.tensor([4, 0, 2], dtype=torch.int32) if rows else None
    untouched = torch.tensor([1, 3, 5])
    if rows:
        state[untouched] = 7
    found = []
    for t in range(0, time, steps):
        positions = torch.full((batch,), t, dtype=torch.int32) if ring else None
        found.append(
            causal_conv1d_update(x[..., t : t + steps], state, *filters, positions, indices)
        )
    torch.testing.assert_close(torch.cat(found, -1), expected)
    if rows:
        assert (state[untouched] == 7).all()
    if not ring:
        _, last = causal_conv1d(**given, return_final_state=True)
        held = state if indices is None else state[indices.long()]
        torch.testing.assert_close(held[..., 1 - width :], last)


def test_rows_below_zero_are_skipped() -> None:
    x, state, weight = torch.randn(2, 3), torch.randn(4, 3, 3), torch.randn(3, 4)
    before = state.clone()
    indices = torch.tensor([-1, 2], dtype=torch.int32)
    y = causal_conv1d_update(x, state, weight, conv_state_indices=indices)
    assert y.shape == (2, 3)
    assert (y[0] == 0).all()
    assert torch.equal(state[:2], before[:2])
    assert torch.equal(state[2, :, -1], x[1])


def test_rows_far_below_zero_are_skipped() -> None:
    """The lower 32 bits are those of a row."""
    state, weight = torch.zeros(2, 3, 3), torch.ones(3, 4)
    rows = torch.tensor([-1, 1 - 2**32, -(2**32), 1])
    y = causal_conv1d_update(torch.ones(4, 3), state, weight, conv_state_indices=rows)
    assert y[:, 0].tolist() == [0, 0, 0, 1]
    assert state.sum((1, 2)).tolist() == [0, 3]


def test_states_pass_from_call_to_call() -> None:
    given = drawn(2, 4, 30, 5, bias=True, activation="silu")
    x, state, found = given.pop("x"), None, []
    for part in x.split([1, 2, 20, 7], -1):
        y, state = causal_conv1d(part, **given, initial_state=state, return_final_state=True)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, -1), causal_conv1d(x, **given))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_empty(shape: tuple[int, int, int]) -> None:
    given = drawn(*shape, 4, bias=True, state=True, activation="silu")
    leaves = differentiable(given)
    y, last = causal_conv1d(**given, return_final_state=True)
    assert y.shape == shape
    if shape[2] == 0:
        assert torch.equal(last, given["initial_state"])
    grads = torch.autograd.grad(y.sum() + last.sum(), [*leaves.values()])
    assert [g.shape for g in grads] == [t.shape for t in leaves.values()]


def test_what_lies_beyond_the_width_does_not_count() -> None:
    x = torch.randn(1, 2, 12)
    x[..., 3] = torch.inf
    y = causal_conv1d(x, torch.rand(2, 3) + 1)
    assert y[..., :3].isfinite().all()
    assert y[..., 6:].isfinite().all()
    assert (y[..., 3:6] == torch.inf).all()


def test_any_strides_of_gradients() -> None:
    given = drawn(2, 3, 8, 4, state=True)
    leaves = differentiable(given)
    y = causal_conv1d(**given)
    weights = torch.randn(2, 8, 3).transpose(1, 2)
    found = torch.autograd.grad(y, [*leaves.values()], weights, retain_graph=True)
    expected = torch.autograd.grad(y, [*leaves.values()], weights.contiguous())
    torch.testing.assert_close(found, expected)


def test_explained() -> None:
    given = drawn(2, 3, 8, 4, bias=True)
    differentiable(given)
    x, weight, bias = given["x"], given["weight"], given["bias"]
    text = str(explain(causal_conv1d, x, weight, bias))
    assert "time_last_forward" in text
    assert "time_last_backward" in text


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_commands_describe_a_call_in_any_dtype(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    call = OPERATOR.parse(name, (2, 8, 16), Namespace(width=None, channel_last=False))
    assert describe(*call.args, **call.kwargs)["forward"].problem.dtype == name


def test_what_was_checked_before_is_checked_again_where_it_differs() -> None:
    """Calls of a kind that was seen go past the checks; others must not."""
    x, weight, bias = torch.randn(1, 3, 8), torch.randn(3, 4), torch.randn(3)
    bounds = torch.tensor([0, 5, 8])
    for _ in range(3):
        first = causal_conv1d(x, weight, bias, cu_seqlens=bounds, activation="silu")
        causal_conv1d(x, weight, bias)
    for wrong in (bias[:2], bias.double(), bias.to_sparse()):
        with pytest.raises((TypeError, ValueError), match="bias"):
            causal_conv1d(x, weight, wrong)
    with pytest.raises(ValueError, match="activation"):
        causal_conv1d(x, weight, bias, activation=[1])  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="must rise from 0"):
        causal_conv1d(x, weight, bias, cu_seqlens=bounds.add_(1), activation="silu")
    # Other values, and gradients that are asked for later, count.
    again = causal_conv1d(2 * x, weight.requires_grad_(), bias)
    assert again.requires_grad
    assert not torch.equal(again, first)
    expected, _ = plainly(2 * x, weight, bias)
    torch.testing.assert_close(again, expected)
    torch.autograd.grad(again.sum(), [weight])


def test_sums_are_in_float32() -> None:
    assert compute_dtype(torch.bfloat16) == compute_dtype(torch.float32) == torch.float32
