"""What selective_scan's kernels are compared with: it is what torch makes of the reference, one step after the other."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import cases, reference
from scan_registry.kernels.selective_scan.problem import INTERVAL

#: One step, steps of one part alone, and several tiles of each part; the states, and channels in groups.
SHAPES = ((1, 1, 1, 1), (2, 4, 5, 3), (1, 6, 101, 4), (2, 4, 232, 5))

TRIALS = [(shape, setting) for shape in SHAPES for setting in cases.SETTINGS]
SEQUENCES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
GRADS = (
    *("u_grad", "delta_grad", "A_grad", "B_grad", "C_grad", "D_grad", "z_grad", "bias_grad"),
    "initial_grad",
)


def wide(trial: cases.Trial) -> tuple[list[Tensor | None], Tensor]:
    """What sequences are given with, and the state before each, (B, S, D, N)."""
    found = [trial.inputs[name] for name in SEQUENCES]
    initial = trial.inputs["initial_state"]
    if initial is None:
        initial = torch.zeros_like(trial.expected["final_state"])
    return [None if t is None else t.double() for t in found], initial.double()


def bounds(trial: cases.Trial) -> Tensor:
    offsets = trial.inputs["offsets"]
    return torch.tensor([0, trial.shape[2]]) if offsets is None else offsets


@pytest.mark.parametrize(("shape", "setting"), TRIALS, ids=str)
def test_results_are_the_references(shape: cases.Shape, setting: cases.Setting) -> None:
    torch.manual_seed(0)
    trial = cases.draw(shape, setting, "float32", "cpu")
    given, initial = wide(trial)
    out, final = reference.forward(*given, setting.softplus, initial, bounds(trial))
    out_grad, final_grad = trial.inputs["out_grad"], trial.inputs["final_grad"]
    grads = reference.backward(
        (*given, initial), setting.softplus, bounds(trial), out_grad, final_grad, (True,) * 9
    )
    expected = {"out": out, "final_state": final, **dict(zip(GRADS, grads, strict=True))}
    assert {name for name, x in expected.items() if x is not None} | {"adjoints", "sizes"} == {
        *trial.expected
    }
    for name, right in expected.items():
        if right is not None:
            assert trial.expected[name].shape == right.shape
            assert relative_error(trial.expected[name], right.detach()) <= 1e-13, name


@pytest.mark.parametrize(("shape", "setting"), TRIALS, ids=str)
def test_parts_hand_on_the_gradient_of_the_state_before_them(
    shape: cases.Shape, setting: cases.Setting
) -> None:
    torch.manual_seed(0)
    trial = cases.draw(shape, setting, "float32", "cpu")
    (u, delta, A, B, C, D, z, bias), initial = wide(trial)
    out_grad = trial.inputs["out_grad"]
    for number, (begin, end) in enumerate(pairwise(bounds(trial).tolist())):
        tiles = -(-(end - begin) // INTERVAL)
        steps = -(-tiles // cases.PARTS) * INTERVAL
        for part in range(1, cases.PARTS):
            own = slice(min(end, begin + part * steps), min(end, begin + (part + 1) * steps))
            given = (
                *(u[..., own], delta[..., own], A, B[..., own], C[..., own], D),
                *(None if z is None else z[..., own], bias, torch.zeros_like(initial[:, 0])),
            )
            *_, right = reference.backward(
                given, setting.softplus, None, out_grad[..., own], None, (False,) * 8 + (True,)
            )
            assert relative_error(trial.expected["adjoints"][:, number, part], right) <= 1e-13
            right = reference.step_sizes(delta[..., own], bias, setting.softplus).sum(-1)
            assert relative_error(trial.expected["sizes"][:, number, part], right) <= 1e-13


@pytest.mark.parametrize(("shape", "setting"), TRIALS, ids=str)
def test_checkpoints_are_the_states_before_each_interval(
    shape: cases.Shape, setting: cases.Setting
) -> None:
    torch.manual_seed(0)
    trial = cases.draw(shape, setting, "float32", "cpu")
    (u, delta, A, B, C, _, _, bias), initial = wide(trial)
    right = reference.checkpoints(
        u, delta, A, B, C, bias, setting.softplus, initial, bounds(trial), INTERVAL
    )
    # Both are rounded to float32, each from a float64 of its own.
    torch.testing.assert_close(trial.inputs["checkpoints"], right, rtol=2e-7, atol=1e-30)
