"""CUDA kernels of linear_scan over few contiguous channels with one gate for all time steps, in an emulator of the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from contiguous_channels import DIRECTIONS, is_taken, only_kernel, posed, solved

from scan_registry.kernels.linear_scan import cases
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.linear_scan.space import CONSTANT_GATE
from scan_registry.kernels.model import ITEM_SIZE, Kernel, Variant

#: (batch, channels, time): a tile that is not full, threads without a channel, columns of which the last is narrower, a tile for
#: each of several columns, and several tiles.
SHAPES = ((2, 17, 50), (2, 5, 720), (1, 37, 300), (2, 65, 130), (1, 8, 1100), (3, 4, 1))
#: Likewise, of two channels for each thread.
WHOLE = ((2, 34, 50), (2, 10, 720), (1, 74, 300), (2, 130, 130), (1, 16, 1100), (3, 8, 1))
SETTINGS = (
    cases.Setting(states=True, broadcast=("time",)),
    cases.Setting(reverse=True, broadcast=("batch", "time")),
    cases.Setting(states=True, reverse=True, broadcast=("time",)),
)
#: Rows of a thread as few as there may be, so that few time steps have groups of groups of tiles.
MANY_TILES = (1, 29, 9_000)


def the_kernel(direction: str, dtype: str = "float32") -> tuple[Kernel, Variant]:
    return only_kernel(direction, CONSTANT_GATE, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_states_and_sums(
    direction: str, dtype: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    kernel, variant = the_kernel(direction, dtype)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    narrow = ITEM_SIZE[dtype] == 2
    for seed, (shape, setting) in enumerate(product(WHOLE if narrow else SHAPES, SETTINGS)):
        trial = solved(shape, setting, dtype)
        aligned = narrow or bool(seed % 2)
        case = trial.case(kernel.name, aligned=aligned, sums=direction == "backward")
        library.run(case.problem, case.tensors, seed)
        assert case.error() <= cases.TOLERANCE[dtype], (shape, setting)


@pytest.mark.slow
@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_groups_of_groups_of_tiles(
    direction: str,
    zeroed: bool,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A column of more than 32 × 32 tiles, with gates close to one, whoever zeroes the workspace. Every two of these values."""
    torch.manual_seed(0)
    from scan_registry.kernels.linear_scan import constant_gate

    monkeypatch.setattr(constant_gate, "_FEW_BYTES", 0 if zeroed else 1 << 24)
    kernel, variant = the_kernel(direction)
    few_rows = replace(
        variant, statics=tuple((n, 1 if n == "steps" else v) for n, v in variant.statics)
    )
    library = cuda_emulator.emulated(kernel, few_rows, tmp_path)
    reverse = zeroed ^ (direction == "backward")
    setting = cases.Setting(states=True, lasting=True, reverse=reverse, broadcast=("time",))
    case = cases.draw(MANY_TILES, setting, "float32", "cpu").case(
        kernel.name, aligned=True, sums=False
    )
    launch = kernel.launch(few_rows, case.problem, 10_000)
    assert launch.grid[2] > 1024
    assert launch.zeroed == zeroed
    library.run(case.problem, case.tensors, int(reverse))
    assert case.error() <= cases.TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (posed("64,2048,17:float32", gate_stride=0), True),
        (posed("16,16000,8:float32", gate_stride=0), True),
        (posed("1,262144,21:float32", gate_stride=0), True),
        (posed("1,1048576,8:float32", gate_stride=0), False),
        (posed("8,16384,64:complex64", gate_stride=0), True),
        (posed("64,2048,17:float32"), False),
        (posed("64,2048,17:float32", "backward", gate_stride=0), False),
        (posed("32,8192,64:float32", gate_stride=0), False),
        (posed("8,4096,256:float32", gate_stride=0), False),
        (posed("64,100,17:float32", gate_stride=0), True),
        (posed("64,50,17:float32", gate_stride=0), False),
        (posed("64,256,20:float32", gate_stride=0), False),
        (posed("64,2048,3:float32", gate_stride=0), False),
        (posed("1,1073741824,8:float32", gate_stride=0), False),
        (posed("30,78057,72:bfloat16", gate_stride=0), True),
        (posed("8,5988,134:float16", gate_stride=0), True),
        (posed("8,8192,512:bfloat16", gate_stride=0), True),
        (posed("8,5988,133:float16", gate_stride=0), False),
        (posed("26,22298,14:float16", gate_stride=0), False),
        (posed("8,4096,1024:bfloat16", gate_stride=0), False),
        (posed("8,4096,256:bfloat16", gate_stride=0), False),
        (posed("485,1908,16:float16", gate_stride=0), False),
    ],
    ids=repr,
)
def test_what_takes_few_channels(problem: LinearScanProblem, expected: bool) -> None:
    """Where other kernels would leave most SMs or threads idle."""
    kernel, variant = the_kernel(problem.direction, problem.dtype)
    assert is_taken(kernel, variant, problem) == expected


def test_backward_takes_what_it_sums() -> None:
    kernel, variant = the_kernel("backward")
    for case in ("64,2048,17:float32", "1,1048576,8:float32"):
        problem = posed(case, "backward", gate_stride=0)
        assert kernel.rules.accepts(variant, problem) is not None
        assert kernel.rules.accepts(variant, replace(problem, sums=True)) is None
