"""The kernel that copies rows of pools, in the emulator."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from scan_registry.aot.compile import compile_variant
from scan_registry.hardware.target import Target
from scan_registry.kernels import operators
from scan_registry.kernels.state_rows import cases, reference
from scan_registry.kernels.state_rows.spec import FAMILY, RowsProblem
from scan_registry.runtime import jit

(KERNEL,) = FAMILY.kernels
(VARIANT,) = KERNEL.variants


def test_it_is_behind_no_operator() -> None:
    assert FAMILY.name not in operators()


def test_rows_are_copied_both_ways(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """In units of all sizes, from and to rows with gaps; what lies in the gaps and in other rows stays."""
    library = cuda_emulator.emulated(KERNEL, VARIANT, tmp_path)
    units = set()
    for number, trial in enumerate(cases.trials("float32", cases.QUICK, "cpu")):
        for case in trial.launches("copy"):
            assert case.error() > 0 or not case.problem.units
            library.run(case.problem, case.tensors, number)
            assert case.error() == 0, f"{trial} {case.problem}"
            units.add((case.problem.unit, case.problem.scatter))
    assert units == {(16, False), (16, True), (2, False), (2, True)}


def test_the_reference() -> None:
    pool = torch.arange(6.0).view(3, 2)
    indices = torch.tensor([2, -1, 1, 5, 0])
    assert reference.gather(pool, indices, pad_slot=0).tolist() == [
        [4, 5],
        [0, 0],
        [2, 3],
        [0, 0],
        [0, 0],
    ]
    after = reference.scatter(pool, -torch.ones(5, 2), indices, pad_slot=0)
    assert after.tolist() == [[0, 1], [-1, -1], [-1, -1]]


def test_a_grid_has_a_last_row() -> None:
    problem = RowsProblem(1, 65_536 * 512, 16, 1, 1, 1, 1)
    assert "no room" in (KERNEL.rules.accepts(VARIANT, problem) or "")


@pytest.mark.skipif(isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_it_compiles_without_spills(arch: str) -> None:
    binary, _ = compile_variant(VARIANT, Target.parse(arch))
    assert not binary.spill_bytes
