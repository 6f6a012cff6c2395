"""What attestations of the ssd_scan kernels draw and expect."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scan_registry.kernels.cases import there
from scan_registry.kernels.ssd_scan import cases, reference
from scan_registry.kernels.ssd_scan.problem import CHUNK, DIRECTIONS
from scan_registry.kernels.ssd_scan.spec import parameters

SHAPE = (2, 2 * CHUNK + 9, 4, 3, 5)


def solved_by_reference(trial: cases.Trial, z: Tensor | None = None) -> dict[str, Tensor]:
    """Results by a loop that torch differentiates, with ``z`` in place of the trial's, whose gate kernels do not differentiate.
    The initial state, if it is zeros, has a gradient, too."""
    setting, batch, heads = trial.setting, trial.shape[0], trial.shape[2]
    tensors = {
        name: t.double().requires_grad_() if t is not None and t.is_floating_point() else t
        for name, t in trial.inputs.items()
    }
    bounds = tensors["cu_seqlens"]
    sequences = 1 if bounds is None else len(bounds) - 1
    of_state = batch, sequences, heads, *trial.shape[3:]
    initial = tensors["initial_state"]
    if initial is None:
        initial = torch.zeros(of_state, dtype=torch.float64, requires_grad=True)
    out, final = reference.forward(
        *(there(tensors[name]) for name in ("x", "dt", "A", "B", "C")), tensors["D"], z, tensors["dt_bias"],
        setting.softplus, cases._limits(setting), initial if bounds is not None else initial[:, 0], tensors["seq_idx"],
        bounds,
    )  # fmt: skip
    final = final.reshape(of_state)
    # A final state is the initial one times a decay, plus what does not depend on it.
    (decays,) = torch.autograd.grad(final.sum(), initial, retain_graph=True)
    results, grads = [out], [there(tensors["out_grad"]).detach()]
    if tensors["final_grad"] is not None:
        results, grads = [out, final], [*grads, tensors["final_grad"].detach()]
    names = {"x_grad": "x", "dt_grad": "dt", "A": "A", "B_grad": "B", "C_grad": "C", "D": "D", "dt_bias": "dt_bias"}  # fmt: skip
    leaves = {n: tensors[of] for n, of in names.items() if tensors[of] is not None}
    leaves["initial_grad"] = initial
    gradients = torch.autograd.grad(results, [*leaves.values()], grads)
    results_of = {"out": out, "final_state": final, "sequence_decays": decays[..., 0, 0]}
    results_of |= dict(zip(leaves, gradients, strict=True))
    # Without D or dt_bias, those of zeros.
    of_D = results_of.pop("D", (grads[0] * there(tensors["x"])).sum((0, 1, 3)))
    of_bias = results_of.pop("dt_bias", results_of["dt_grad"].sum((0, 1)))
    of_D = of_D.sum(1) if of_D.dim() == 2 else of_D
    results_of["head_grads"] = torch.stack([results_of.pop("A"), of_D, of_bias])
    return results_of


@pytest.mark.parametrize("setting", cases.SETTINGS, ids=str)
def test_what_is_expected_is_what_torch_differentiates(setting: cases.Setting) -> None:
    trial = cases.draw(SHAPE, setting, "float16", "cpu")
    expected = solved_by_reference(trial)
    if (z := trial.inputs["z"]) is not None:
        expected["ungated"] = expected["out"]
        expected["out"] = solved_by_reference(trial, z.double())["out"]
    for name, value in expected.items():
        torch.testing.assert_close(trial.expected[name], value.detach(), rtol=1e-9, atol=1e-9)
    assert {*expected, "states", "adjoints"} == {*trial.expected}


@pytest.mark.parametrize("setting", cases.SETTINGS, ids=str)
def test_states_and_adjoints_are_of_the_parts_of_a_scan(setting: cases.Setting) -> None:
    """A scan of a chunk alone, from the state before it and with the gradient of the state after it, has the same
    gradients."""
    trial = cases.draw(SHAPE, setting, "float16", "cpu")
    bounds = trial.inputs["cu_seqlens"]
    ends = [0, SHAPE[1]] if bounds is None else bounds.tolist()
    for number in range(len(ends) - 1):
        for place, first in enumerate(range(ends[number], ends[number + 1], CHUNK)):
            slot, last = (
                ends[number] // CHUNK + number + place,
                min(ends[number + 1], first + CHUNK),
            )
            assert trial.occupied[slot]
            steps = {
                n: t if t is None or n not in ("x", "dt", "B", "C", "z", "out_grad", "seq_idx") else t[:, first:last]
                for n, t in trial.inputs.items()
            }  # fmt: skip
            starts = steps["seq_idx"] is not None and place > 0
            if starts and (trial.inputs["seq_idx"][:, first] != trial.inputs["seq_idx"][:, first - 1]).any():  # fmt: skip
                continue
            steps |= {
                "cu_seqlens": None,
                "initial_state": trial.expected["states"][:, slot, None],
                "final_grad": trial.expected["adjoints"][:, slot, None],
            }
            alone = cases.solve(steps, setting.softplus, cases._limits(setting)).results
            for name in ("out", "x_grad", "dt_grad", "B_grad", "C_grad"):
                torch.testing.assert_close(alone[name], trial.expected[name][:, first:last], rtol=1e-9, atol=1e-9)  # fmt: skip
    assert not trial.expected["states"][:, ~trial.occupied].any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("setting", cases.SETTINGS, ids=str)
def test_every_pointer_has_a_tensor_and_results_count(
    direction: str, setting: cases.Setting
) -> None:
    trial = cases.draw((2, 70, 4, 8, 8), setting, "bfloat16", "cpu")
    for case in trial.launches(direction):
        optional = {"D", "z", "dt_bias", "initial_state", "cu_seqlens", "seq_idx", "final_grad", "ungated", "states", "workspace"}  # fmt: skip
        pointers = {p.name for p in parameters(case.problem.direction) if p.kind == "pointer"}
        assert pointers - {*case.tensors} <= optional
        for name in ("x", "B", "C", "out_grad", *(["z"] if setting.gated else [])):
            tensor = there(case.tensors[name])
            assert tensor.stride(-1) == 1
            assert not any(stride % 8 for stride in tensor.stride()[:3])
        assert case.error() == torch.inf
        for name, value in case.expected.items():
            out = there(case.tensors[name])
            out.zero_()
            first = out[:, 0, 0] if name == "head_grads" else out[(0,) * (out.dim() - value.dim())]
            first.copy_(value)
        assert case.error() < 4e-3
        for name in case.expected:
            there(case.tensors[name]).add_(float(case.expected[name].abs().max()) + 1)
            assert case.errors()[name] > 0.05


def test_trials_have_every_setting() -> None:
    shapes = cases.SMALL
    settings = {str(t.setting) for t in cases.trials("float16", shapes[:3], "cpu")}
    assert settings == {*map(str, cases.SETTINGS)}
