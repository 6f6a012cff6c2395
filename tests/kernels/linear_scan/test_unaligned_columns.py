"""CUDA kernels of linear_scan over contiguous channels whose rows start at any address, in an emulator of the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scan_registry.kernels.linear_scan import cases, unaligned
from scan_registry.kernels.linear_scan.problem import STRIDED, LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant

#: Elements before and behind each tensor. They and the gaps between rows hold a number that no result has, or NaN.
AROUND, UNTOUCHED = 4096, 77.0
#: SMs of the GPU that launches are for.
SM_COUNT = 3
#: (batch, channels, time), elements between rows, and whether time runs backwards: whole narrow rows, in several tiles and less
#: than one; rows of less than 16 bytes; with gaps, or with the other batches between; columns of whole rows and of parts, in
#: several tiles.
BATCHES = -1  # the other batches are between
NARROW = (
    ((2, 7, 700), 0, False),
    ((3, 21, 50), 0, True),
    ((2, 25, 130), 8, False),
    ((1, 2, 2100), 0, True),
    ((1, 3, 2), 0, False),
    ((3, 5, 90), BATCHES, True),
)
WIDE = (
    ((1, 69, 200), 0, True),
    ((2, 101, 130), 0, False),
    ((1, 141, 90), 16, True),
    ((1, 301, 60), 0, False),
    ((2, 77, 60), BATCHES, False),
)


def variant_of(direction: str, dtype: str, narrow: bool) -> Variant:
    """One that every wheel holds."""
    kernel = FAMILY.kernel(f"channel_last_{direction}", "cuda")
    return next(
        variant
        for variant in kernel.variants
        if variant.text("dtype") == dtype
        and unaligned.is_unaligned(variant)
        and (variant.number("warps") - 2 * variant.number("copy_warps") == 1) == narrow
    )


def strides_of(problem: LinearScanProblem, gap: int) -> Strides:
    """Of sequences that lie as (batch, time, channels), with so many elements between rows, or as (time, batch, channels)."""
    if gap == BATCHES:
        return Strides(0, problem.channels, 1, problem.batch * problem.channels)
    by_time = problem.channels + gap
    return Strides(0, problem.time * by_time, 1, by_time)


def surrounded(
    tensor: torch.Tensor, strides: Strides, offset: int, around: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of ``around``, and in it a copy of (1, batch, channels, time), so many elements off a 16-byte boundary."""
    steps = tuple(vars(strides).values())
    extent = sum((size - 1) * step for size, step in zip(tensor.shape, steps, strict=True))
    memory = torch.full((extent + 1 + 2 * AROUND + offset,), around, dtype=tensor.dtype)
    assert memory.data_ptr() % 16 == 0
    placed = memory.as_strided(tensor.shape, steps, AROUND + offset)
    placed.copy_(tensor)
    return memory, placed


def scattered(
    case: cases.Case, gap: int
) -> tuple[LinearScanProblem, dict[str, torch.Tensor | None], list[torch.Tensor]]:
    """The problem and the tensors with each sequence at another offset, and the memory of the results."""
    problem, tensors, memories, offsets = case.problem, dict(case.tensors), [], count(1, 3)
    rows = strides_of(problem, gap)
    for name, tensor in case.tensors.items():
        if tensor is None or tensor.dim() != 4 or tensor.shape[-1] != problem.time:
            continue
        is_result = name in case.expected
        around = UNTOUCHED if is_result else torch.nan
        memory, tensors[name] = surrounded(tensor, rows, next(offsets) % 8, around)
        if is_result:
            memories.append(memory)
    names = STRIDED[problem.direction]
    strides = tuple(
        own if name == "state" else rows for name, own in zip(names, problem.strides, strict=True)
    )
    alignment = 2 if problem.dtype != "float32" else 4
    return replace(problem, strides=strides, alignment=alignment), tensors, memories


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "wide"])
def test_rows_at_any_address(
    direction: str, dtype: str, narrow: bool, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """The results are right, and nothing beside them changes."""
    torch.manual_seed(0)
    kernel = FAMILY.kernel(f"channel_last_{direction}", "cuda")
    variant = variant_of(direction, dtype, narrow)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for seed, (shape, gap, reverse) in enumerate(NARROW if narrow else WIDE):
        for states in (True, False):
            setting = cases.Setting(states=states, reverse=reverse ^ (not states))
            case = cases.draw(shape, setting, dtype, "cpu").case(kernel.name, aligned=True)
            problem, tensors, memories = scattered(case, gap)
            library.run(problem, tensors, seed, SM_COUNT)
            ran = replace(case, tensors=tensors)
            assert ran.error() <= cases.TOLERANCE[dtype], (shape, gap, setting)
            for name in case.expected:
                if tensors[name].dim() == 4 and tensors[name].shape[-1] == problem.time:
                    tensors[name].fill_(UNTOUCHED)
            assert all(bool((memory == UNTOUCHED).all()) for memory in memories), (
                shape,
                gap,
                setting,
            )


def a_problem(
    direction: str, batch: int, channels: int, time: int, dtype: str = "bfloat16"
) -> LinearScanProblem:
    rows = Strides(0, channels * time, 1, channels)
    return LinearScanProblem(
        direction=direction,  # type: ignore[arg-type]
        layout="channel_last",
        dtype=dtype,
        gates_dtype=dtype,
        outer=1,
        batch=batch,
        channels=channels,
        time=time,
        strides=(*(rows,) * (len(STRIDED[direction]) - 1), Strides(0, channels, 1, 0)),  # type: ignore[index]
        alignment=16,
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("batch", "channels", "kept"), [(8, 1001, 64), (64, 301, 0), (256, 21, 21), (1024, 7, 7)]
)
def test_columns_share_the_gpu_evenly(direction: str, batch: int, channels: int, kept: int) -> None:
    problem = a_problem(direction, batch, channels, 512)
    kernel = FAMILY.kernel(problem.kernel, "cuda")
    taking = [
        variant
        for variant in kernel.variants
        if unaligned.is_unaligned(variant) and kernel.rules.accepts(variant, problem) is None
    ]
    (variant,) = taking
    others = [
        v for v in kernel.variants if v != variant and kernel.rules.accepts(v, problem) is None
    ]
    assert others
    assert all(kernel.cost(variant, problem) < kernel.cost(other, problem) for other in others)
    own = unaligned.columns_channels(variant, problem, 132)
    assert kept in (0, own)
    launch = kernel.launch(variant, problem, 132)
    assert launch.grid == (batch * -(-channels // own), 1, 1)
    assert launch.scalars["flags"] >> 2 == own


def test_what_has_no_such_kernel() -> None:
    """Few columns, few scans, one gate for all steps, offsets that change differently, and rows that overlap."""
    problem = a_problem("forward", 64, 301, 512)
    kernel = FAMILY.kernel(problem.kernel, "cuda")
    variant = variant_of("forward", "bfloat16", narrow=False)
    assert kernel.rules.accepts(variant, problem) is None
    first, *others = problem.strides
    for other in (
        replace(problem, batch=2),
        replace(problem, channels=304, strides=(Strides(0, 304 * 512, 1, 304),) * 4),
        replace(problem, sequences=3),
        *(replace(problem, strides=(replace(first, time=step), *others)) for step in (0, 200, 302)),
    ):
        assert kernel.rules.accepts(variant, other) is not None
    narrow = variant_of("forward", "bfloat16", narrow=True)
    for batch, takes in ((200, True), (100, False)):
        answer = kernel.rules.accepts(narrow, a_problem("forward", batch, 7, 512))
        assert (answer is None) == takes, answer
