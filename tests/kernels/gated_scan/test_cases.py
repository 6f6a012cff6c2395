"""What the kernels of gated_scan are tested on, against the same step by step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from scan_registry.kernels.gated_scan import cases
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.problem import POINTERS, integers
from scan_registry.kernels.gated_scan.spec import FAMILY

SHAPE = 2, 3, 13


def stepwise(trial: cases.Trial) -> dict[str, Tensor]:
    """What is expected, by autograd through a loop over time."""
    kind, given, (batch, channels, time) = KINDS[trial.kind], trial.inputs, trial.shape
    reset, offsets, initial = given["reset"], given["offsets"], given["initial_state"]
    leaves = [t.double() for n in range(len(kind.inputs)) if (t := given[f"input{n}"]) is not None]
    parameters = torch.zeros(0, channels) if given["parameters"] is None else given["parameters"]
    bounds = [0, time] if offsets is None else offsets.tolist()
    of_state = batch, channels, len(bounds) - 1
    before = torch.zeros(of_state) if initial is None else initial.view(of_state)
    wide = [*leaves, parameters.double(), before.double()]
    for leaf in wide:
        leaf.requires_grad_()
    *_, parameters, before = wide
    marks = None if reset is None else reset[:, None]
    gate, token = kind.gates(*leaves, *(p[:, None] for p in parameters), reset=marks)
    if marks is not None:
        gate = torch.where(marks, 0.0, gate)
    states, ends = [torch.zeros(0)] * time, []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        h = before[..., number]
        for t in range(begin, end)[:: -1 if trial.setting.reverse else 1]:
            h = states[t] = gate[..., t] * h + token[..., t]
        ends.append(h)
    outputs = torch.stack(states, -1), torch.stack(ends, -1)
    final_grad, states_grad = given["final_state_grad"], given["states_grad"]
    assert states_grad is not None
    last_grad = torch.zeros(of_state) if final_grad is None else final_grad.view(of_state)
    grads = torch.autograd.grad(
        outputs, wide, (states_grad.double(), last_grad.double()), allow_unused=True
    )
    names = [*(f"input{n}_grad" for n in range(len(leaves)))]
    names += ["parameters_grad", "initial_state_grad"]
    found = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
    return {"states": outputs[0].detach(), "final_state": outputs[1].detach(), **found}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", cases.SETTINGS, ids=str)
def test_expected_is_what_a_loop_gives(kind: str, setting: cases.Setting) -> None:
    torch.manual_seed(0)
    trial = cases.draw(SHAPE, kind, setting, "float32", "cpu")
    found = stepwise(trial)
    for name, expected in trial.expected.items():
        torch.testing.assert_close(found[name].view(expected.shape), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["time_last_forward", "channel_last_backward"])
def test_a_launch_is_right_only_if_all_that_is_wanted_is_written(name: str, kind: str) -> None:
    torch.manual_seed(0)
    trial = cases.draw(SHAPE, kind, cases.SETTINGS[6], "float32", "cpu")
    launches = [*trial.launches(name)]
    assert [len(each.expected) for each in launches[:2]] == [len(launches[0].expected)] * 2
    assert len(launches[2].expected) == 1
    for case in launches:
        assert case.error() == torch.inf or [*case.expected] == ["parameters_grad"]
        assert case.tensors.keys() <= {*POINTERS[case.problem.direction]}
        assert case.problem.scalars().keys() == {*integers(case.problem.direction)}  # type: ignore[arg-type]
        for output, expected in case.expected.items():
            out = case.tensors[output]
            assert out is not None
            (out[0] if output == "parameters_grad" else out).copy_(expected)
        assert case.error() <= 1e-6
        for output, expected in case.expected.items():
            out = case.tensors[output]
            assert out is not None
            kept = out.clone()
            out[(0,) * out.dim()] += 1 + 0.01 * expected.norm()
            assert case.error() > cases.TOLERANCE["float32"], output
            out.copy_(kept)


def test_every_kind_meets_every_setting() -> None:
    torch.manual_seed(0)
    shapes = tuple((1, 2, time) for time in range(1, len(cases.THOROUGH) + 1))
    met = {(trial.kind, trial.setting) for trial in cases.trials("float32", shapes, "cpu")}
    assert len(met) == len(KINDS) * len(cases.SETTINGS)


@pytest.mark.parametrize("time", [1, 31, 200, 5000])
def test_there_is_room_for_the_parts_of_every_launch(time: int) -> None:
    trial = cases.draw((2, 8, time), "rg_lru", cases.Setting(packed=True), "float32", "cpu")
    for kernel in FAMILY.kernels:
        for case in trial.launches(kernel.name) if "backward" in kernel.name else ():
            for variant in kernel.variants:
                if variant.text("kind") == "rg_lru":
                    launch = kernel.launch(variant, case.problem, 132)
                    assert 0 < launch.scalars["parts"] <= case.problem.most_parts


def test_memory_with_gaps_has_strides_of_its_own_for_each_tensor() -> None:
    trial = cases.draw((2, 8, 16), "rg_lru", cases.SETTINGS[3], "bfloat16", "cpu")
    whole, gaps, _ = (case.problem for case in trial.launches("channel_last_backward"))
    assert whole.whole_chunks(8)
    assert not gaps.whole_chunks(8)
    assert gaps.plain()
    assert len({strides.time for strides in gaps.strides}) == len(gaps.strides)
    assert (whole.reset_batch, gaps.reset_batch) == (16, 21)
    assert (whole.inputs, whole.parameters, whole.parts) == (3, 1, 2)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.parameters])
def test_a_sum_over_steps_that_cancels_is_compared_with_its_terms(kind: str) -> None:
    torch.manual_seed(0)
    case = cases.draw((2, 3, 7), kind, cases.Setting(), "float32", "cpu").case(
        "time_last_backward", aligned=True
    )
    partial, size = case.tensors["parameters_grad"], case.terms["parameters_grad"].norm()
    assert partial is not None
    case.expected["parameters_grad"].fill_(0)
    for error in (1e-7, 1e-5):
        partial.zero_()
        partial.view(-1)[0] = error * size
        assert case.errors()["parameters_grad"] == pytest.approx(error)


def test_parts_of_a_gradient_that_cancel_are_what_it_is_compared_with() -> None:
    """The part of min_gru's first input through the gate and that through the token have different signs. Of a single step, the gradient
    may be far smaller than both, and no more exact than they are."""
    torch.manual_seed(0)
    drawn = (
        cases.draw((1, 1, 1), "min_gru", cases.Setting(states=True), "float32", "cpu")
        for _ in range(100)
    )
    trial = min(
        drawn, key=lambda each: each.expected["input0_grad"].abs() / each.terms["input0_grad"]
    )
    expected, size = trial.expected["input0_grad"], trial.terms["input0_grad"]
    assert expected.abs() < 0.1 * size
    case = trial.case("time_last_backward", aligned=True)
    grad = case.tensors["input0_grad"]
    assert grad is not None
    grad.copy_(expected + 1e-3 * size)
    assert case.errors()["input0_grad"] == pytest.approx(1e-3, rel=1e-2)
