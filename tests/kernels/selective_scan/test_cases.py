"""What selective_scan's kernels are compared with: it is what torch makes of the reference, one step after the other."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product

import pytest
import torch
from selective_gradients import of_reference
from torch import Tensor

from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import cases, reference
from scan_registry.kernels.selective_scan.problem import INTERVAL
from scan_registry.kernels.selective_scan.solution import Solution
from scan_registry.kernels.selective_scan.spec import FAMILY

#: One step, steps of one part alone, and several tiles of each part; the states, and channels in groups.
SHAPES = ((1, 1, 1, 1), (2, 4, 5, 3), (1, 6, 101, 4), (2, 4, 232, 5))

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
    cu_seqlens = trial.inputs["cu_seqlens"]
    return torch.tensor([0, trial.shape[2]]) if cu_seqlens is None else cu_seqlens


@pytest.fixture(params=product(SHAPES, cases.SETTINGS), ids=str)
def trial(request: pytest.FixtureRequest) -> cases.Trial:
    torch.manual_seed(0)
    return cases.draw(*request.param, "float32", "cpu")


def test_results_are_the_references(trial: cases.Trial) -> None:
    setting = trial.setting
    given, initial = wide(trial)
    out, final = reference.forward(*given, setting.softplus, initial, bounds(trial))
    out_grad, final_grad = trial.inputs["out_grad"], trial.inputs["final_grad"]
    grads = of_reference((*given, initial), setting.softplus, bounds(trial), out_grad, final_grad)
    expected = {"out": out, "final_state": final, **dict(zip(GRADS, grads, strict=True))}
    handed_on = {"adjoints", "sizes", "part_states", "part_sizes"}
    assert {name for name, x in expected.items() if x is not None} | handed_on == {*trial.expected}
    for name, right in expected.items():
        if right is not None:
            assert trial.expected[name].shape == right.shape
            assert relative_error(trial.expected[name], right.detach()) <= 1e-13, name


def test_parts_hand_on_the_gradient_of_the_state_before_them(trial: cases.Trial) -> None:
    setting = trial.setting
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
            *_, right = of_reference(
                given, setting.softplus, None, out_grad[..., own], None, (False,) * 8 + (True,)
            )
            assert relative_error(trial.expected["adjoints"][:, number, part], right) <= 1e-13
            right = reference.step_sizes(delta[..., own], bias, setting.softplus).sum(-1)
            assert relative_error(trial.expected["sizes"][:, number, part], right) <= 1e-13


def test_parts_hand_on_the_state_after_them(trial: cases.Trial) -> None:
    setting = trial.setting
    (u, delta, A, B, C, *_, bias), initial = wide(trial)
    for number, (begin, end) in enumerate(pairwise(bounds(trial).tolist())):
        tiles = -(-(end - begin) // INTERVAL)
        steps = -(-tiles // cases.PARTS) * INTERVAL
        for part in range(cases.PARTS - 1):
            own = slice(min(end, begin + part * steps), min(end, begin + (part + 1) * steps))
            given = u[..., own], delta[..., own], A, B[..., own], C[..., own], None, None, bias
            nothing = torch.zeros_like(initial[:, 0])
            _, right = reference.forward(*given, setting.softplus, nothing, None)
            assert relative_error(trial.expected["part_states"][:, number, part], right) <= 1e-13
            right = reference.step_sizes(delta[..., own], bias, setting.softplus).sum(-1)
            assert relative_error(trial.expected["part_sizes"][:, number, part], right) <= 1e-13


def test_checkpoints_are_the_states_before_each_interval(trial: cases.Trial) -> None:
    (u, delta, A, B, C, _, _, bias), initial = wide(trial)
    right = reference.checkpoints(
        u, delta, A, B, C, bias, trial.setting.softplus, initial, bounds(trial), INTERVAL
    )
    # Both are rounded to float32, each from a float64 of its own.
    torch.testing.assert_close(trial.inputs["checkpoints"], right, rtol=2e-7, atol=1e-30)


def _tensor(given: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = given[name]
    assert tensor is not None, name
    return tensor


def unsolved(given: Mapping[str, Tensor | None], softplus: bool, parts: int) -> Solution:
    """What is asked of a problem, all zero: of large problems in no time."""
    cu_seqlens, (u, A, B) = given["cu_seqlens"], (_tensor(given, name) for name in ("u", "A", "B"))
    batch, channels, time = u.shape
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    of_states = batch, sequences, channels, A.shape[1]
    results = {name: torch.zeros_like(u) for name in ("out", "u_grad", "delta_grad")}
    results |= {name: torch.zeros(of_states) for name in ("final_state", "initial_grad")}
    results |= {"A_grad": torch.zeros_like(A)}
    results |= {name: torch.zeros_like(B) for name in ("B_grad", "C_grad")}
    if given["z"] is not None:
        results |= {name: torch.zeros(channels) for name in ("D_grad", "bias_grad")}
        results |= {"z_grad": torch.zeros_like(u)}
    handed_on = torch.zeros(batch, sequences, parts, channels, A.shape[1])
    checkpoints = torch.zeros(batch, time // INTERVAL + sequences, channels, A.shape[1])
    both = handed_on, handed_on[..., 0]
    return Solution(results, *both, *both, checkpoints, {})


@pytest.mark.parametrize("dtype", cases.TOLERANCE)
def test_every_variant_takes_a_problem_of_an_attestation(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "solve", unsolved)
    trials = [*cases.trials(dtype, cases.THOROUGH, "cpu")]
    for kernel in FAMILY.kernels:
        problems = [case.problem for trial in trials for case in trial.launches(kernel.name)]
        for variant in kernel.variants:
            if variant.text("dtype") == dtype:
                assert not all(kernel.rules.accepts(variant, each) for each in problems), variant


def test_a_sum_that_cancels_is_compared_with_its_terms() -> None:
    torch.manual_seed(0)
    case = cases.draw((2, 3, 5, 2), cases.Setting(), "float32", "cpu").case(
        "backward", aligned=True
    )
    for name in ("A_grad", "D_grad", "bias_grad"):
        partial, size = _tensor(case.tensors, name), case.terms[name].norm()
        partial.zero_()
        case.expected[name].fill_(0)
        partial.view(-1)[0] = 1e-7 * size
        assert case.errors()[name] == pytest.approx(1e-7)
        partial.view(-1)[0] = 1e-5 * size
        assert case.errors()[name] == pytest.approx(1e-5)


def test_numbers_below_the_normal_ones_are_as_exact_as_the_smallest_of_these() -> None:
    expected = torch.tensor([3.2e-7], dtype=torch.float64)
    assert relative_error(expected.half(), expected) < 2e-3
    assert relative_error(expected.float(), expected) < 1e-7
    assert relative_error(torch.tensor([1e-6]).half(), expected) > 2e-3
