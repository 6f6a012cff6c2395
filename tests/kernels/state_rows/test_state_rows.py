"""The kernel that copies rows of pools, in the emulator."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry.aot.compile import compile_variant
from scan_registry.hardware.target import Target
from scan_registry.kernels import operators
from scan_registry.kernels.state_rows import cases, reference
from scan_registry.kernels.state_rows.spec import FAMILY, RowsProblem
from scan_registry.ops import row_copies
from scan_registry.ops.pools import StateRows
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
    assert units == {(unit, scatter) for unit in (16, 4, 2) for scatter in (False, True)}


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
    problem = RowsProblem(1, 65_536 * 512, 16, 1, 1, 1, 1, 1)
    assert "no room" in (KERNEL.rules.accepts(VARIANT, problem) or "")


@pytest.mark.skipif(isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_it_compiles_without_spills(arch: str) -> None:
    binary, _ = compile_variant(VARIANT, Target.parse(arch))
    assert not binary.spill_bytes


def of_floats(*shape: int) -> Tensor:
    return torch.randn(9, *shape)


POOLS = {
    "dense": lambda: of_floats(3, 4, 8),
    "two bytes": lambda: of_floats(5, 3).bfloat16(),
    "runs with gaps": lambda: of_floats(6, 4)[..., :3],
    "slots with gaps": lambda: of_floats(2, 6, 4)[:, 1],
    "channels together": lambda: of_floats(3, 8).transpose(1, 2),
    "channels of two bytes together": lambda: of_floats(3, 8).bfloat16().transpose(1, 2),
    "a part of them": lambda: of_floats(3, 8).transpose(1, 2)[..., 1:],
    "numbers of eight bytes together": lambda: of_floats(3, 8).double().transpose(1, 2),
    "gaps between gaps": lambda: of_floats(4, 6, 8)[:, ::2, ::3, :4],
}
LEFT_TO_TORCH = ("numbers of eight bytes together", "gaps between gaps")


@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_rows_of_pools_are_those_that_torch_copies(
    name: str,
    wide: torch.dtype,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, with the emulator in place of the launch; pools that the kernel cannot read are left to torch."""
    torch.manual_seed(0)
    library, problems = cuda_emulator.emulated(KERNEL, VARIANT, tmp_path), []

    def prepare(ordinal: Any, family: Any, problem: RowsProblem, *_: Any) -> Any:
        problems.append(problem)
        assert KERNEL.rules.accepts(VARIANT, problem) is None
        return SimpleNamespace(launch=True, run=lambda tensors: library.run(problem, tensors, 0))

    pool = POOLS[name]()
    indices = torch.tensor([3, -1, 8, 5, 9, 0]).to(wide)
    rows = StateRows(pool.clone(memory_format=torch.preserve_format), indices, pad_slot_id=5)
    own = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype).copy_(pool)
    emulated = rows._replace(pool=own)
    states = torch.randn(6, *pool.shape[1:])
    expected = rows.read()
    rows.write(states, indices)
    monkeypatch.setattr(row_copies, "prepare", prepare)
    monkeypatch.setattr(row_copies, "_on_gpu", lambda pool: True)
    monkeypatch.setattr(row_copies, "plan_cache", row_copies.plan_cache.__class__())
    assert torch.equal(emulated.read(), expected)
    version = own._version
    emulated.write(states, indices)
    assert torch.equal(own, rows.pool)
    assert own._version > version
    assert len(problems) == (0 if name in LEFT_TO_TORCH else 2)
