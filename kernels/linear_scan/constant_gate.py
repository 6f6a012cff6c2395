"""Few contiguous channels, each of which has one gate for all time steps, in tiles that look back (``constant_gate_columns.cuh``): the
tile, what takes it, and how it launches.

Since a channel's steps all scale the state alike, tiles exchange the states that they end with, and no maps. So a tile costs
little, and a CTA keeps it in registers.
"""

from __future__ import annotations

from collections.abc import Iterator

from scan_registry.kernels.linear_scan.problem import (
    MOST_ALONG_Y,
    Direction,
    LinearScanProblem,
    ceil_div,
)
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.linear_scan.streams import HEAD
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: By dtype and direction, the steps of a thread, and CTAs for each SM.
_STEPS_AND_BLOCKS: dict[tuple[str, str], tuple[int, int]] = {
    ("float32", "forward"): (24, 3),
    ("float32", "backward"): (32, 2),
    ("bfloat16", "forward"): (28, 3),
    ("bfloat16", "backward"): (32, 2),
    ("float16", "forward"): (28, 3),
    ("float16", "backward"): (32, 2),
    ("complex64", "forward"): (12, 3),
    ("complex64", "backward"): (16, 2),
}
#: Bytes of a tile's rows, at most, and of rows of which a thread's loads share no sectors.
_WIDE, _NARROW = 128, 16
#: Of aligned rows: scans beyond which kernels that pass over columns serially are faster, and elements of 4 bytes beyond which
#: those are that cut columns into segments, but backward of few scans. Steps below which a tile is mostly empty.
_MANY_SCANS, _ONE_WAVE, _FEW_SCANS, _LEAST_TIME = 1024, 1 << 22, 16, 512
#: Steps of other rows below which nothing was timed.
_LEAST_MISALIGNED_TIME = 64
#: Aligned rows of 16-bit elements: steps below which a tile is mostly empty; channels of a narrow column, numbers of such columns
#: that fill an H200 evenly, and steps below which that counts; channels of a wide column, scans beyond which such columns are
#: faster, and how many channels they may be wider than the rows.
_LEAST_WHOLE_TIME, _NARROW_COLUMN, _EVEN, _SHORT_TIME = 1024, 16, range(96, 133), 16_384
_WIDE_COLUMN, _MANY_WHOLE_SCANS, _PADDED = 64, 5000, 1.15
#: Tiles of a group, groups of a group of level 2, and levels.
_GROUP, _LEVELS = 32, 3
#: Steps that it numbers, with those of a tile beyond.
_MOST = 2**31 - 2**16
#: Bytes of a published shift, and of all that a CTA zeroes sooner than the driver.
_PIECE, _FEW_BYTES = 16, 1 << 19
_ZEROED = 1 << 7  # among the flags: whether the workspace is zeroed before the launch


def tiles(direction: Direction, dtype: str) -> Iterator[Tile]:
    """The one that every wheel holds, if there is one."""
    if (dtype, direction) in _STEPS_AND_BLOCKS:
        steps, blocks = _STEPS_AND_BLOCKS[dtype, direction]
        yield {"warps": 8, "steps": steps, "blocks": blocks}


def _vector(dtype: str) -> int:
    """Channels of a thread."""
    return 2 if ITEM_SIZE[dtype] == 2 else 1


def sums(variant: Variant) -> bool:
    return True


def shared(direction: Direction, variant: Variant) -> int:
    return 0


def times(variant: Variant) -> int:
    """Time steps of a tile whose rows are as wide as they may be."""
    dtype = variant.text("dtype")
    across = _WIDE // ITEM_SIZE[dtype] // _vector(dtype)
    return 32 * variant.number("warps") // across * variant.number("steps")


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why it does not solve a problem, or is not the fastest for it."""
    if not problem.has_one_gate():
        return "gates change with time"
    if problem.direction == "backward" and not problem.sums:
        return "it sums the gradient of gates"
    return _exceeds(variant, problem) or _others_are_faster(problem)


def _exceeds(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why rows are not what it needs, or too many."""
    if _vector(problem.dtype) > 1 and not problem.whole_chunks(_vector(problem.dtype)):
        return "a thread's channels do not lie in whole words"
    if problem.batch > MOST_ALONG_Y or problem.time > _MOST:
        return f"more than {MOST_ALONG_Y} batches or {_MOST} steps"
    if launch(variant, problem, 0).grid[2] > _GROUP**_LEVELS:
        return f"more than {_GROUP**_LEVELS} tiles of a column"
    return None


def _others_are_faster(problem: LinearScanProblem) -> str | None:
    item, scans = ITEM_SIZE[problem.dtype], problem.batch * problem.channels
    whole = problem.whole_chunks(problem.chunk())
    least = _LEAST_TIME if whole else _LEAST_MISALIGNED_TIME
    if problem.channels * item < _NARROW * _vector(problem.dtype) or problem.time < least:
        return "rows are short, or time steps few"
    if not whole:
        return None
    if item == 2:
        return _columns_are_faster(problem)
    if scans > _MANY_SCANS:
        return f"{scans} scans: kernels that pass over columns serially are faster"
    few = problem.direction == "backward" and scans <= _FEW_SCANS
    if item < 8 and scans * problem.time > _ONE_WAVE and not few:
        return "rows are aligned, and so many that segments are faster"
    return None


def _columns_are_faster(problem: LinearScanProblem) -> str | None:
    """Why kernels that pass over columns of aligned rows of 16-bit elements are faster."""
    batch, channels, time = problem.batch, problem.channels, problem.time
    even = batch * ceil_div(channels, _NARROW_COLUMN) in _EVEN and time < _SHORT_TIME
    fit = ceil_div(channels, _WIDE_COLUMN) * _WIDE_COLUMN <= _PADDED * channels
    fit = fit or channels % _NARROW_COLUMN == 0
    if time < _LEAST_WHOLE_TIME or even or (fit and batch * channels > _MANY_WHOLE_SCANS):
        return "time steps are few, or columns fill a GPU: kernels that pass over them serially are faster"
    return None


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """It takes only what it is the fastest for; below the costs of tiles that look back (``scalar.py``)."""
    return -5.0


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """A CTA for each tile, and for each column one that has none, of which the first zeroes the workspace."""
    threads = ceil_div(problem.channels, _vector(problem.dtype))
    columns = ceil_div(threads, _WIDE // ITEM_SIZE[problem.dtype] // _vector(problem.dtype))
    across = ceil_div(threads, columns)
    columns = ceil_div(threads, across)
    steps = 32 * variant.number("warps") // across * variant.number("steps")
    groups = [ceil_div(problem.time, steps)]
    for _ in range(_LEVELS - 1):
        groups.append(ceil_div(groups[-1], _GROUP))
    workspace = 0
    if groups[0] > 1:
        workspace = HEAD + problem.batch * columns * across * sum(groups) * _PIECE
    zeroed = not 0 < workspace <= _FEW_BYTES
    grid = columns, problem.batch, groups[0] + (not zeroed)
    scalars = problem.scalars(across + _ZEROED * zeroed)
    return Launch(grid, scalars, workspace, zeroed, pieces=groups[0])
