"""The problems that scans pose to kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.arguments import Options
from scan_registry.kernels.linear_scan.op.calls import packed_sequences
from scan_registry.kernels.linear_scan.op.plans import runner
from scan_registry.kernels.linear_scan.op.problems import (
    make_kernel_call,
    make_reduction_call,
)
from scan_registry.ops.checks import common_shape

SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("entering", [None, "state"])
@pytest.mark.parametrize("leaving", [False, True])
def test_whether_packed_sequences_have_states(
    monkeypatch: pytest.MonkeyPatch, packed: bool, entering: str | None, leaving: bool
) -> None:
    x = torch.rand(2, 8)
    bounds = torch.tensor([0, 3, 8]) if packed else None
    state = entering and torch.rand(2, *([2] if packed else []))
    problems = []
    monkeypatch.setattr(plans, "runner", lambda problem, *_: problems.append(problem) or print)
    options, wanted = Options(-1, False, leaving), (True, True, leaving)
    plans.plan_forward(x, x, state, bounds, options)
    plans.plan_backward(x, x, state, bounds, x, None, options, wanted)
    plans.plan_backward(x, x, None, bounds, x, state, options, wanted)
    has_states = packed and (entering is not None or leaving)
    assert [problem.has_states for problem in problems] == [has_states] * 3


@pytest.mark.parametrize("batch", [3, 70])
def test_tiles_of_a_reduction_are_full(batch: int) -> None:
    """Of many batches of few channels, the batches lie side by side in a tile."""
    states = torch.randn(batch, 5, 40)
    for gates in (torch.rand(5, 1), torch.rand(batch, 5, 1), torch.rand(1, 1)):
        call = make_reduction_call(gates, states, None, -1, False)
        assert call is not None
        problem = call.problem
        assert problem.channels in (max(batch, 5), 5 * batch)  # folded where gates allow it
        grad, initial = torch.randn_like(states), torch.randn(batch, 5)
        pieces = problem.reduction().pieces
        found = torch.zeros(pieces, *gates.shape)
        run = runner(problem, torch.device("cpu"), "auto")
        assert callable(run)
        inputs = {"tokens_grad": grad, "states": states, "initial_state": initial}
        run({**inputs, "gates_grad": found})
        before = torch.cat([initial.unsqueeze(-1), states[..., :-1]], -1)
        expected = (grad * before).double().sum_to_size(gates.shape)
        assert torch.allclose(found.sum(0).double(), expected, atol=1e-4)


def test_a_gate_of_its_own_for_a_row_lies_anywhere() -> None:
    """It is read by itself; rows in pieces of 16 bytes."""
    tokens, gates = torch.randn(2, 3, 64), torch.rand(2, 3, 5)
    for gate, alignment in (
        (gates[..., 1:2], 16),
        (torch.rand(1 + 2 * 3 * 64)[1:].view(2, 3, 64), 4),
    ):
        call = make_kernel_call("forward", gate, {"tokens": tokens}, None, -1, False)
        assert call.problem.alignment == alignment
        assert call.problem.one_gate_a_row() == (alignment == 16)


def test_one_packed_sequence_is_none_to_a_gpu() -> None:
    """Its bounds are those of time, and kernels for what is not packed are faster; the CPU checks bounds."""
    assert packed_sequences(None, "cpu") == packed_sequences(None, "cuda") == 0
    assert packed_sequences(1, "cpu") == 1
    assert packed_sequences(1, "cuda") == 0
    assert packed_sequences(2, "cuda") == 2


@settings(deadline=None)  # torch imports sympy the first time
@given(SHAPES, SHAPES)
def test_shapes_broadcast_as_torch_has_it(one: list[int], other: list[int]) -> None:
    try:
        expected = tuple(torch.broadcast_shapes(tuple(one), tuple(other)))
    except RuntimeError:
        expected = None
    assert common_shape(one, other) == expected
    assert common_shape(torch.Size(one), tuple(other)) == expected
