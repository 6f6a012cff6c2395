"""CUDA kernels of linear_scan over short rows of contiguous time, in an emulator of the GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from contiguous_channels import (
    DIRECTIONS,
    keeps_to_its_memory,
    solved,
    with_and_without_states,
)

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan import cases, short_rows
from scan_registry.kernels.linear_scan.problem import STRIDED, LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.space import SHORT
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import ITEM_SIZE, Kernel, Variant

#: (batch, channels, time): a step; some lanes for each row, of which the last ones may have no step, and all; rows that fill no
#: tile, or several; and so many rows that few lanes share each.
SHAPES = (
    *((1, 5, 1), (300, 1, 3), (7, 41, 21), (1, 33, 197), (2, 11, 333), (3, 1, 639), (1, 1, 35)),
    (17000, 1, 13),
)
#: Aligned rows of which lanes read different banks, by the bytes of an element.
ALIGNED = {2: (3, 7, 72), 4: (3, 7, 40)}
DTYPES = ("bfloat16", "float16", "float32")
ONE_GATE = (
    cases.Setting(states=True, broadcast=("time",)),
    cases.Setting(reverse=True, broadcast=("batch", "time")),
    cases.Setting(states=True, reverse=True, broadcast=("batch", "channel", "time")),
)


def first_variant(direction: str, dtype: str) -> tuple[Kernel, Variant]:
    kernel = FAMILY.kernel(f"time_last_{direction}", "cuda")
    pins = {("access", SHORT), ("dtype", dtype)}
    return kernel, next(v for v in kernel.variants if pins <= {*v.statics})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turn", "dtype", "direction"),
    [(turn, *of) for turn, of in enumerate(product(DTYPES, DIRECTIONS))],
)
def test_short_rows(
    turn: int,
    direction: str,
    dtype: str,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    thorough: bool,
) -> None:
    """The results are right, and nothing beside them changes."""
    kernel, variant = first_variant(direction, dtype)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    shapes = (*SHAPES, ALIGNED[ITEM_SIZE[dtype]])
    for shape in shapes:
        assert kernel.rules.accepts(variant, posed(shape, dtype, direction)) is None, shape
    problems = with_and_without_states(shapes, turn + turn // 2, thorough)
    keeps_to_its_memory(kernel, variant, library, problems, cases.TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "dtype"), [*product(DIRECTIONS, DTYPES)])
def test_short_rows_with_one_gate(
    direction: str, dtype: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """For each row, or for all; its gradient is summed over time, or not computed. Aligned rows are taken where sums are wanted, and
    forward where batches share the gates of channels."""
    kernel, variant = first_variant(direction, dtype)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    shapes = ((300, 1, 3), (7, 41, 21), (2, 11, 333), (1, 1, 35), (5, 3, 48))
    for seed, (shape, setting) in enumerate(product(shapes, ONE_GATE)):
        trial = solved(shape, setting, dtype)
        for sums in (True, False) if direction == "backward" else (False,):
            case = trial.case(kernel.name, aligned=True, sums=sums)
            takes = kernel.rules.accepts(variant, case.problem) is None
            apart = "batch" in setting.broadcast and "channel" not in setting.broadcast
            faster = sums or (direction == "forward" and apart)
            assert takes == (faster or shape[2] % 16 != 0), (shape, setting, sums)
            if takes:
                library.run(case.problem, case.tensors, seed)
                assert case.error() <= cases.TOLERANCE[dtype], (shape, setting, sums)
            if takes and sums:
                # Nobody asks for the gates' gradient: no states are read, and no sums written.
                wanted = case.tensors["tokens_grad"].clone()
                case.tensors["tokens_grad"].fill_(float("nan"))
                unasked = {**case.tensors, "states": None, "gates_grad": None}
                library.run(case.problem, unasked, seed)
                assert case.tensors["tokens_grad"].equal(wanted)


def posed(
    shape: tuple[int, int, int], dtype: str, direction: str, gap: int = 0
) -> LinearScanProblem:
    batch, channels, time = shape
    row = Strides(0, channels * (time + gap), time + gap, 1)
    return LinearScanProblem(
        direction=direction,  # type: ignore[arg-type]
        layout="time_last",
        dtype=dtype,
        gates_dtype=dtype,
        outer=1,
        batch=batch,
        channels=channels,
        time=time,
        strides=(row,) * (len(STRIDED[direction]) - 1) + (Strides(0, channels, 1, 0),),  # type: ignore[index]
        alignment=16,
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "gap", "access"),
    [
        ((16, 768, 197), "bfloat16", 0, SHORT),
        ((64, 384, 577), "float32", 0, SHORT),
        ((32, 512, 1025), "float16", 0, SHORT),
        ((32, 512, 1025), "float32", 0, "misaligned"),
        ((16, 768, 200), "bfloat16", 0, "aligned"),
        ((16, 768, 72), "bfloat16", 0, SHORT),
        ((16, 768, 144), "float32", 0, SHORT),
        ((16, 768, 64), "bfloat16", 0, "aligned"),
        ((16, 768, 512), "float32", 0, "aligned"),
        ((16, 1536, 512), "float32", 0, SHORT),
        ((16, 768, 197), "bfloat16", 8, "misaligned"),
        ((16, 768, 1101), "bfloat16", 0, "misaligned"),
        ((16, 768, 197), "float64", 0, "generic"),
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_takes_short_rows(
    shape: tuple[int, int, int], dtype: str, gap: int, access: str, direction: str
) -> None:
    problem = posed(shape, dtype, direction, gap)
    kernel = FAMILY.kernel(f"time_last_{direction}", "cuda")
    assert kernel.tunable.shape is not None
    assert f"access={access}" in kernel.tunable.shape(problem).kind
    if access == SHORT:  # which archives for other GPUs do not hold
        other = "misaligned" if shape[2] % (16 // ITEM_SIZE[dtype]) else "aligned"
        assert f"access={other}" in kernel.tunable.shape(problem, Target((8, 0))).kind


def test_lanes_that_share_rows() -> None:
    """One for a row of few steps, all for the longest rows, and more where rows are few. Lanes have room for all steps, and those of
    common rows read different banks of shared memory."""
    assert short_rows.lanes_and_steps(1 << 20, 9, 2) == (1, 9)
    assert short_rows.lanes_and_steps(1 << 20, 1025, 2)[0] == 32
    assert short_rows.lanes_and_steps(16 * 768, 197, 2) == (16, 14)
    assert (
        short_rows.lanes_and_steps(3680, 79, 2)[0] > short_rows.lanes_and_steps(1 << 20, 79, 2)[0]
    )
    for rows, time, item in product((1, 1 << 20), range(1, 1089, 3), (2, 4)):
        lanes, steps = short_rows.lanes_and_steps(rows, time, item)
        assert lanes * steps >= time
