"""How the errors of linear_scan's kernels are measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scan_registry.kernels.linear_scan import cases

SETTING = cases.Setting(states=True)


@pytest.mark.parametrize("kernel", ["time_last_forward", "channel_last_backward"])
def test_a_state_that_cancels_is_measured_by_its_sequence(kernel: str) -> None:
    """A last step of 1e-9 among steps of about 1 is as exact as they are if it is wrong by 1e-8."""
    torch.manual_seed(0)
    trial = cases.draw((1, 1, 500), SETTING, "float32", "cpu")
    case = next(iter(trial.launches(kernel)))
    state = next(name for name in case.expected if name in cases.SEQUENCE_OF)
    expected = {**case.expected, state: torch.full_like(case.expected[state], 1e-9)}
    right = {name: tensor.clone() for name, tensor in expected.items()}
    for wrong_by, least, most in ((0.0, 0.0, 0.0), (1e-8, 1e-10, 1e-7), (1e-2, 1e-4, 1.0)):
        tensors = {**case.tensors, **right, state: expected[state] + wrong_by}
        assert least <= replace(case, tensors=tensors, expected=expected).error() <= most


def test_what_was_not_written_is_no_state() -> None:
    trial = cases.draw((1, 1, 500), SETTING, "float32", "cpu")
    case = next(iter(trial.launches("time_last_forward")))
    tensors = {**case.tensors, **case.expected}
    tensors["final_state"] = torch.full_like(case.expected["final_state"], torch.nan)
    assert replace(case, tensors=tensors).error() == torch.inf


@pytest.mark.parametrize("time", [1, 2, 50])
def test_what_sums_over_time_has_one_gate(time: int) -> None:
    """Where there is one step, nothing is broadcast along time, and nothing is summed."""
    trial = cases.draw((2, 8, time), cases.Setting(broadcast=("time",)), "float32", "cpu")
    problems = [case.problem for case in trial.launches("channel_last_backward")]
    summing = [problem for problem in problems if problem.sums]
    assert len(summing) == (time > 1)
    assert all(problem.has_one_gate() for problem in summing)
