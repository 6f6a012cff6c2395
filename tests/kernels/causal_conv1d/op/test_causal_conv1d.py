"""``causal_conv1d`` and its step on the CPU, against a loop over steps in float64."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import Call, OperatorTests, arguments_of
from torch import Tensor

from scan_registry import causal_conv1d, causal_conv1d_update
from scan_registry.kernels.causal_conv1d.op.operator import OPERATOR
from scan_registry.kernels.causal_conv1d.reference import compute_dtype

OP = torch.ops.scan_registry.causal_conv1d.default
BACKWARD_OP = torch.ops.scan_registry.causal_conv1d_backward.default
UPDATE_OP = torch.ops.scan_registry.causal_conv1d_update.default
NAMES = ("x", "weight", "bias", "initial_state")


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
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, activation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
            numbers, parts, begin, last = seq_idx[b].tolist(), [], 0, state
            for t in range(1, len(numbers) + 1) if numbers else ():
                if t < len(numbers) and numbers[t] == numbers[t - 1]:
                    continue
                y, last = one_sequence(x[b][:, begin:t], weight, bias, state, silu)
                parts.append(torch.zeros_like(y) if numbers[begin] < 0 else y)
                state, begin = zeros, t
            y = torch.cat(parts, 1) if parts else x[b]
        lines.append(y)
        ends.append(last)
    return torch.stack(lines), torch.stack(ends)


class TestCausalConv1d(OperatorTests):
    cases = {
        "plain": {},
        "bias": {"bias": True, "activation": "swish"},
        "state": {"bias": True, "state": True, "activation": "silu"},
        "packed": {"packed": True, "bias": True, "activation": "silu"},
        "packed states": {"packed": True, "state": True},
        "indexed": {"indexed": True, "bias": True, "activation": "silu"},
        "indexed states": {"indexed": True, "state": True, "narrow": True},
        **{f"width {n}": {"width": n, "bias": True, "state": n % 2 == 0, "indexed": n % 3 == 0} for n in (2, 3, 5, 6, 7, 8)},
        **{f"width {n}, packed": {"width": n, "packed": True, "state": n < 6, "narrow": True} for n in (2, 3, 5, 8)},
    }  # fmt: skip
    few = ("state", "packed states", "indexed")
    #: Batch, channels and time.
    sizes = ((2, 6, 40), (1, 21, 137), (3, 5, 2), (2, 9, 1))
    small = (2, 3, 8)
    spoilt = ("x", "bias", "initial_state")  # no weight meets what is not there
    large = (3, 150, 700)
    empty = ((0, 3, 5), (2, 0, 5), (2, 3, 0))

    def draw(self, case: str, size: Any, dtype: torch.dtype) -> Call:
        spec = {"width": 4, **self.cases[case]}
        batch, channels, time = size
        batch = 1 if spec.get("packed") else batch
        weights = dtype if spec.get("narrow") else compute_dtype(dtype)
        bounds = torch.tensor([0, 0, time // 3, time // 3 + time // 9, time])
        rows = len(bounds) - 1 if spec.get("packed") else batch
        tensors = {
            "x": torch.randn(batch, channels, time).to(dtype),
            "weight": (torch.randn(channels, spec["width"]) / 2).to(weights),
        }
        if spec.get("bias"):
            tensors["bias"] = torch.randn(channels).to(weights)
        if spec.get("state"):
            tensors["initial_state"] = torch.randn(rows, channels, spec["width"] - 1).to(dtype)
        marks = (torch.rand(batch, time) < 0.3).cumsum(1).int() - 1
        others = {
            "cu_seqlens": bounds if spec.get("packed") else None,
            "seq_idx": marks if spec.get("indexed") else None,
            "activation": spec.get("activation"),
        }
        return Call(tensors, others)

    def run(self, **arguments: Any) -> tuple[Tensor, ...]:
        return causal_conv1d(**arguments, return_final_state=True)

    def right(self, **arguments: Any) -> tuple[Tensor, ...]:
        x, weight = arguments["x"], arguments["weight"]
        if not x.shape[0]:
            return x, x.new_zeros(0, x.shape[1], weight.shape[1] - 1)
        return plainly(**arguments)

    def time(self, call: Call, name: str) -> int | None:
        return -1 if name in ("x", "seq_idx", "output 0") else None

    def state(self, call: Call, states: Tensor, number: int) -> Tensor:
        return states.narrow(0, number, 1)

    def states(self, call: Call, each: list[Tensor]) -> Tensor:
        return torch.cat(each)

    def in_pieces(self, case: str) -> bool:
        return not self.cases[case].get("indexed")

    def checks(self, case: str) -> Iterator[Any]:
        call = self.draw(case, self.small, torch.float32)
        small = ("test_schema", "test_faketensor")
        more = ("test_autograd_registration", "test_aot_dispatch_dynamic")
        for leaves in (call, call.leaves()):
            tensors = arguments_of(leaves, *NAMES, "seq_idx", "cu_seqlens")
            yield OP, (*tensors, True, True, "auto"), (*small, *more)
        tensors, seeds = (
            arguments_of(call, *NAMES, "seq_idx", "cu_seqlens"),
            self.run(**call.arguments),
        )
        for wanted in ([True] * 4, [True, False, False, False], [False, True, False, True]):
            yield BACKWARD_OP, (*tensors, *seeds, True, "auto", wanted), small

    refused = {
        "list": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, not list"),
        "integers": ({"x": torch.ones(2, 3, 8).int()}, TypeError, "x has dtype int32; accepted are"),
        "rank": ({"x": torch.ones(3, 8)}, ValueError, r"x has shape \(3, 8\)"),
        "width": ({"weight": torch.randn(3, 9)}, ValueError, "width 9; accepted are 2 to 8"),
        "channels": ({"weight": torch.randn(2, 4)}, ValueError, "x has 3 channels"),
        "conv1d": ({"weight": torch.randn(3, 1, 4)}, ValueError, r"squeeze\(1\)"),
        "sparse": ({"weight": torch.ones(3, 4).to_sparse()}, TypeError, r"weight is sparse; .* pass weight\.to_dense\(\)"),
        "oneDNN": ({"x": torch.ones(2, 3, 8).to_mkldnn()}, TypeError, r"x is in oneDNN's layout; .* pass x\.to_dense\(\)"),
        "bias": ({"bias": torch.randn(4)}, ValueError, r"bias has shape \(4,\)"),
        "mix": ({"x": torch.ones(2, 3, 8).double()}, TypeError, "float64 does not mix"),
        "activation": ({"activation": "relu"}, ValueError, "'relu'; accepted are"),
        "activations": ({"activation": [1]}, ValueError, "activation"),
        "state": (
            {"initial_state": torch.randn(2, 3, 4)},
            ValueError,
            r"initial_state has shape \(2, 3, 4\); it must be \(batch, channels, width - 1\), here \(2, 3, 3\)",
        ),
        "both": (
            {"seq_idx": torch.zeros(2, 8).int(), "cu_seqlens": torch.tensor([0, 8])},
            ValueError,
            "seq_idx and cu_seqlens are both given",
        ),
        "numbers": ({"seq_idx": torch.zeros(2, 7).int()}, ValueError, r"seq_idx has shape \(2, 7\)"),
        "large numbers": ({"seq_idx": torch.full((2, 8), 2**32)}, ValueError, "seq_idx has the number 4294967296"),
        "batches": ({"cu_seqlens": torch.tensor([0, 8])}, ValueError, r"it must be \(1, channels, time\)"),
        "bounds": (
            {"x": torch.ones(1, 3, 8), "cu_seqlens": torch.tensor([0, 5, 9])}, ValueError, "must rise from 0 to the 8 steps",
        ),
        "backend": ({"backend": "cuda"}, ValueError, "needs a CUDA device"),
    }  # fmt: skip


def drawn(batch: int, channels: int, time: int, width: int) -> dict[str, Any]:
    """With a bias and an activation."""
    x = torch.randn(batch, channels, time)
    weight, bias = torch.randn(channels, width) / width**0.5, torch.randn(channels)
    return {"x": x, "weight": weight, "bias": bias, "activation": "silu"}


@pytest.mark.parametrize("time", [1, 3], ids=["one", "several"])
def test_opcheck_of_the_update(time: int) -> None:
    x, state = torch.randn(2, 3, time), torch.randn(2, 3, 5)
    weight, positions = torch.randn(3, 4), torch.tensor([3, 7], dtype=torch.int32)
    torch.library.opcheck(UPDATE_OP, (x, state, weight, None, positions, None, True, "auto"))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 9])
@pytest.mark.parametrize(("width", "length"), [(4, 3), (3, 6), (8, 7)])
def test_updates_continue_a_sequence(
    width: int, length: int, steps: int, rows: bool, ring: bool
) -> None:
    """Whatever holds the state, all steps together are those of the whole sequence."""
    batch, channels, time = 3, 5, 18
    given = drawn(batch, channels, time, width)
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


def test_what_lies_beyond_the_width_does_not_count() -> None:
    x = torch.randn(1, 2, 12)
    x[..., 3] = torch.inf
    y = causal_conv1d(x, torch.rand(2, 3) + 1)
    assert y[..., :3].isfinite().all()
    assert y[..., 6:].isfinite().all()
    assert (y[..., 3:6] == torch.inf).all()


@pytest.mark.parametrize("dtype", TestCausalConv1d.tolerance)
def test_commands_describe_a_call_in_any_dtype(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    call = OPERATOR.parse(name, (2, 8, 16), Namespace(width=None, channel_last=False))
    assert OPERATOR.describe(*call.args, **call.kwargs)["forward"].problem.dtype == name


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
