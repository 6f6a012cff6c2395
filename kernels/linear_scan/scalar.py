"""Contiguous channels in rows that start at any address, copied in words of 4 bytes (``scalar_columns.cuh``): the tile, what
takes it, and how it launches.

A CTA has one tile, ``steps`` time steps of a channel for each thread, and at most ``lanes`` channels side by side. CTAs look back
at the maps of the tiles before their own. So time is cut into as many parts as there are tiles, however few channels there are.
"""

from __future__ import annotations

from collections.abc import Iterator

from scan_registry.kernels.linear_scan import narrow
from scan_registry.kernels.linear_scan.problem import (
    Direction,
    LinearScanProblem,
    ceil_div,
    state_dtype,
)
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: By dtype and direction, the steps of a thread, and CTAs for each SM. GPUs with the least shared memory, 99 KB for a CTA, have
#: room for one. Archives have no room for more dtypes.
_STEPS_AND_BLOCKS: dict[tuple[str, str], tuple[int, int]] = {
    ("bfloat16", "forward"): (32, 3),
    ("bfloat16", "backward"): (24, 2),
    ("float32", "forward"): (24, 4),
    ("float32", "backward"): (24, 3),
    ("complex64", "backward"): (12, 2),
}
#: Columns of the column-serial kernels below which these leave so many SMs idle that looking back is faster: of 64 misaligned
#: channels, by the bytes of an element; and backward of 16 aligned channels of complex64.
_FEW_COLUMNS = {2: 56, 4: 64}
_MISALIGNED_COLUMN, _WIDE_COLUMN, _FEW_WIDE_COLUMNS = 64, 16, 64
#: Steps below which a column-serial kernel has no time to lose.
_LEAST_TIME = 512
#: Channels, and tiles, that the kernel numbers in 32 bits.
_MOST = 2**31 - 1
#: Tiles of a group, and groups of a group of the next level.
_GROUP = 32
#: Bytes before the maps of tiles.
_COUNTER = 16


def tiles(direction: Direction, dtype: str) -> Iterator[Tile]:
    """The one that every wheel holds, if there is one."""
    if (dtype, direction) in _STEPS_AND_BLOCKS:
        steps, blocks = _STEPS_AND_BLOCKS[dtype, direction]
        yield {"warps": 8, "lanes": 32, "steps": steps, "blocks": blocks}


def sums(variant: Variant) -> bool:
    return True


def shared(direction: Direction, variant: Variant) -> int:
    """Bytes of the tiles of all inputs: an element has a word of 4 bytes, if not 8."""
    elements = 32 * variant.number("warps") * variant.number("steps")
    inputs = 2 if direction == "forward" else 3
    return inputs * elements * max(4, ITEM_SIZE[variant.text("dtype")])


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why it does not solve a problem, or is not the fastest for it."""
    if problem.channels > _MOST or launch(variant, problem, 0).grid[0] > _MOST:
        return f"more than {_MOST} channels or tiles"
    if problem.whole_chunks(problem.chunk()):
        return None if _few_wide_columns(problem) else "rows are aligned"
    if problem.dtype == "float32" and narrow.accepts(variant, problem) is None:
        return "kernels for narrow rows are faster"
    return _column_serial_is_faster(problem)


def _column_serial_is_faster(problem: LinearScanProblem) -> str | None:
    """Why a kernel that scans misaligned columns serially is faster, if one takes the problem: rows have to lie alike in all
    tensors for that."""
    if ITEM_SIZE[problem.dtype] == 8 or not problem.congruent():
        return None
    columns = problem.batch * ceil_div(problem.channels, _MISALIGNED_COLUMN)
    if columns < _FEW_COLUMNS[ITEM_SIZE[problem.dtype]] and problem.time >= _LEAST_TIME:
        return None
    return f"{columns} columns of {problem.time} steps: kernels that scan them serially are faster"


def _few_wide_columns(problem: LinearScanProblem) -> bool:
    """Whether rows of elements of 8 bytes are scanned backward by few CTAs otherwise. No kernel cuts them."""
    columns = problem.batch * ceil_div(problem.channels, _WIDE_COLUMN)
    few = columns < _FEW_WIDE_COLUMNS and problem.time >= _LEAST_TIME
    return few and ITEM_SIZE[problem.dtype] == 8 and problem.direction == "backward"


def times(variant: Variant) -> int:
    """Time steps of a tile that has as many channels as it can, which are the fewest."""
    return 32 * variant.number("warps") // variant.number("lanes") * variant.number("steps")


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """It takes only what it is the fastest for."""
    return -1.0


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """A CTA for each tile."""
    columns_across = ceil_div(problem.channels, variant.number("lanes"))
    across = ceil_div(problem.channels, columns_across)
    columns = problem.batch * columns_across
    slots = 32 * variant.number("warps") // across
    groups = [ceil_div(problem.time, slots * variant.number("steps"))]
    grid = (columns * groups[0], 1, 1)
    if groups[0] == 1:
        return Launch(grid, problem.scalars())
    while groups[-1] > 1:
        groups.append(ceil_div(groups[-1], _GROUP))
    maps = columns * across * sum(groups)
    return Launch(grid, problem.scalars(), _COUNTER + maps * _map_bytes(problem.dtype))


def _map_bytes(dtype: str) -> int:
    """Of a map in memory: pieces of 16 bytes, each of three words and a flag."""
    parts = 3 if ITEM_SIZE[dtype] >= 4 else 2  # with the error term of the product
    return 16 * ceil_div(parts * ITEM_SIZE[state_dtype(dtype)] // 4, 3)
