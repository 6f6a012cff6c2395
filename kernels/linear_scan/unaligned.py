"""Columns of contiguous channels whose rows start at any address (``unaligned_columns.cuh``): what they take, and how they
launch.

A variant has ``warps``, of which ``copy_warps`` copy in and as many copy out; ``stages``; ``area``, the bytes of a tile of one
tensor; and ``blocks``. Each thread of the other warps scans one channel, so a column has no more channels than there are such
threads; how many it has is chosen for each problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem, ceil_div
from scan_registry.kernels.linear_scan.space import UNALIGNED, Tile
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: Bytes of a sector. A column scans as many channels of its neighbour as a sector has.
_SECTOR = 32
#: Channels of a row at most, where a CTA has whole rows and one warp that scans.
NARROW = 32
#: Channels of a column at least, where rows are shared by several.
_LEAST = 32
#: Elements from row to row, at most: bytes from row to row of a tile are numbered in 32 bits.
_FARTHEST = 1 << 20
#: What a column costs besides its channels, in channels.
_COLUMN = 16
#: CTAs below which most of a GPU would be idle, and scans below which kernels that cut time are estimated to be faster: a thread
#: takes some 7 ns for each time step, and those kernels 9 ps for each element of 16 bits.
_MANY, _MANY_SCANS = 64, 1024
#: SMs, where no GPU is known: of an H200.
_SMS = 132


def is_unaligned(variant: Variant) -> bool:
    return dict(variant.statics).get("access") == UNALIGNED


def usual(direction: Direction, dtype: str) -> Iterator[tuple[Tile, int]]:
    """What every wheel holds, each with the most CTAs of an SM: for whole narrow rows, and for all others."""
    forward, short = direction == "forward", ITEM_SIZE[dtype] == 2
    yield _tile(1, 2, 5 if forward else 4, 4096), 4
    stages, area = (4, 9728) if short else (5 if forward else 4, 7808)
    # Backward, threads that copy have more tensors, and take the registers that two CTAs would have.
    yield (_tile(4, 3, stages, area), 2) if forward else (_tile(4, 4, stages, area), 1)


def tiles(direction: Direction, dtype: str) -> Iterator[tuple[Tile, int]]:
    """What tuning may choose from."""
    forward = direction == "forward"
    yield from usual(direction, dtype)
    for area, stages in ((2048, 4), (2048, 6), (4096, 3), (6144, 3), (6144, 4)):
        yield _tile(1, 2, stages, area), 6
        yield _tile(1, 1, stages, area), 6
    for copying, (area, stages) in product(
        (2, 3, 4), ((4864, 4), (4864, 6), (6656, 3), (9728, 3), (9728, 4), (13056, 3))
    ):
        yield _tile(4, copying, stages, area), 2 if forward else 1


def _tile(scanning: int, copying: int, stages: int, area: int) -> Tile:
    """By the warps that scan, and those that copy in."""
    return {"warps": scanning + 2 * copying, "copy_warps": copying, "stages": stages, "area": area}


def shared(direction: Direction, tile: Tile) -> int:
    """Bytes of the ring of a CTA, and of two tiles of its results."""
    inputs, results = (2, 1) if direction == "forward" else (3, 2)
    return int(tile["area"]) * (int(tile["stages"]) * inputs + 2 * results)


def times(variant: Variant) -> int:
    """Time steps of a tile, where a column has as many channels as it can."""
    return variant.number("area") // (_scanning(variant) * ITEM_SIZE[variant.text("dtype")])


def _scanning(variant: Variant) -> int:
    """Channels of a column, at most."""
    return 32 * (variant.number("warps") - 2 * variant.number("copy_warps"))


def fits_rows(problem: LinearScanProblem) -> bool:
    """Whether rows do not overlap, and from row to row the offset to 16 bytes changes alike in all tensors."""
    chunk, (first, *others) = problem.chunk(), problem.rows_strides()
    return (
        problem.time > 1
        and not problem.whole_chunks(chunk)
        and all(strides.time >= problem.channels for strides in (first, *others))
        and all(strides.time < _FARTHEST for strides in (first, *others))
        and all(strides.batch >= 0 for strides in (first, *others))
        and all((strides.time - first.time) % chunk == 0 for strides in others)
    )


def refuses(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why the variant cannot or should not solve a problem whose rows it can copy."""
    if problem.has_one_gate():
        return "each channel has one gate for all time steps"
    narrow = _scanning(variant) == NARROW
    if narrow != (problem.channels <= NARROW):
        return f"rows of {problem.channels} channels; it is for {'at most' if narrow else 'more than'} {NARROW}"
    columns = problem.batch * _across(problem, columns_channels(variant, problem, _SMS))
    if columns < _MANY or problem.batch * problem.channels < _MANY_SCANS:
        return f"{problem.batch * problem.channels} scans in {columns} columns would leave most of a GPU idle"
    return None


def columns_channels(variant: Variant, problem: LinearScanProblem, sm_count: int) -> int:
    """Channels of a column: so many that the busiest SM has the least to do, with the channels of its neighbour that a column
    scans besides."""
    channels, threads = problem.channels, _scanning(variant)
    sector: int = _SECTOR // ITEM_SIZE[problem.dtype]
    shared = range(_LEAST, min(threads - sector, channels - 1) + 1, sector)
    whole = [channels] if channels <= threads else []

    def busiest(count: int) -> tuple[int, int]:
        columns = problem.batch * _across(problem, count)
        return ceil_div(columns, sm_count) * (min(channels, count + sector) + _COLUMN), -count

    counts: list[int] = [*shared, *whole]
    return min(counts, key=busiest)


def _across(problem: LinearScanProblem, count: int) -> int:
    return ceil_div(problem.channels, count)


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """A CTA for each column."""
    count = columns_channels(variant, problem, sm_count)
    return Launch((problem.batch * _across(problem, count), 1, 1), problem.scalars(count))
