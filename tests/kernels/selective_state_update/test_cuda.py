"""The CUDA kernel of selective_state_update on the CPU, in an emulator of the GPU, against the float64 reference."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from scan_registry.aot.compile import compile_variant
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Variant
from scan_registry.kernels.selective_state_update import cases, spec
from scan_registry.kernels.selective_state_update.spec import FAMILY
from scan_registry.runtime import jit

(KERNEL,) = FAMILY.kernels
#: One of all, lanes of a warp that have no row, several chunks of a lane, and batches that are cut into slices.
SHAPES = ((1, 1, 1, 1), (3, 1, 20, 16), (2, 4, 6, 64), (9, 2, 8, 8), (1, 2, 3, 256), (5, 3, 5, 33))
NEEDS_NVRTC = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)


@pytest.mark.parametrize("variant", KERNEL.variants, ids=str)
def test_matches_the_reference(
    variant: Variant, cuda_emulator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every option, for threads of one batch and of several, whose last one may be alone."""
    library, dtype = cuda_emulator.emulated(KERNEL, variant, tmp_path), variant.text("dtype")
    torch.manual_seed(0)
    steps, tried = set(), 0
    for number, shape in enumerate(SHAPES):
        for setting in cases.SETTINGS:
            monkeypatch.setattr(spec, "_THREADS_OF_SM", (4096, 8)[number % 2])
            trial = cases.draw(shape, setting, dtype, "cpu")
            for case in trial.launches(KERNEL.name):
                if KERNEL.rules.accepts(variant, case.problem):
                    continue
                tried += 1
                steps.add(KERNEL.launch(variant, case.problem, 3).scalars["steps"])
                library.run(case.problem, case.tensors, number)
                assert case.error() <= cases.TOLERANCE[dtype], f"{trial} {case.problem}"
    assert len(steps) > 1
    assert tried >= 4


def test_step_sizes_of_any_size(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """Softplus of small, large and infinite numbers is that of torch."""
    variant = KERNEL.variants[0]
    library = cuda_emulator.emulated(KERNEL, variant, tmp_path)
    trial = cases.draw((1, 1, 6, 4), cases.Setting(gated=False), "float32", "cpu")
    dt = trial.inputs["dt"]
    assert dt is not None
    dt[0, 0] = torch.tensor([-100.0, -15, 0, 19, 21, 300])
    case = cases.Trial(
        trial.shape,
        trial.setting,
        "float32",
        trial.inputs,
        cases.solved(trial.inputs, trial.setting),
    ).case("step", aligned=True)
    library.run(case.problem, case.tensors, 0)
    assert case.error() <= cases.TOLERANCE["float32"]


def test_rows_that_are_not_there_are_skipped(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """Below zero, or above the last; what is infinite there goes nowhere."""
    variant = KERNEL.variants[0]
    library = cuda_emulator.emulated(KERNEL, variant, tmp_path)
    trial = cases.draw((4, 1, 8, 16), cases.Setting(indexed="int64"), "float32", "cpu")
    case = trial.case("step", aligned=True)
    indices, out, x = (case.tensors[name] for name in ("indices", "out", "x"))
    assert indices is not None
    assert out is not None
    assert x is not None
    state = case.tensors["state"]
    assert state is not None
    before = state.clone()
    indices.copy_(torch.tensor([-(2**40), 6, 2**40, -1]))
    x.fill_(torch.inf)
    library.run(case.problem, case.tensors, 0)
    assert (out == 0).all()
    assert torch.equal(state, before)


@NEEDS_NVRTC
def test_nothing_spills() -> None:
    for variant in KERNEL.variants:
        binary, _ = compile_variant(variant, Target.parse("sm90"))
        assert not binary.spill_bytes, variant


def test_there_are_few_binaries() -> None:
    assert len(FAMILY.variants()) == 13
