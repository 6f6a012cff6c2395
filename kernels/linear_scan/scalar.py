"""Contiguous channels in rows that start at any address, in tiles that look back (``scalar_columns.cuh``): the tile, what takes
it, and how it launches.

A CTA has one tile of some time steps and of all channels, or an even part of them. CTAs look back at the maps of the tiles before
their own. So time is cut into as many parts as there are tiles, however few channels there are; and where batches are short, a
tile has several of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from scan_registry.kernels.linear_scan import narrow
from scan_registry.kernels.linear_scan.problem import (
    MOST_ALONG_Y,
    SUM_STEPS,
    Direction,
    LinearScanProblem,
    ceil_div,
    state_dtype,
)
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.linear_scan.streams import HEAD
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: By dtype and direction, the most steps of a thread, and CTAs of 8 warps for each SM; of 4 warps there are twice as many. GPUs with
#: the least shared memory, 99 KB for a CTA, have room for one. Archives have no room for more dtypes.
_STEPS_AND_BLOCKS: dict[tuple[str, str], tuple[int, int]] = {
    ("bfloat16", "forward"): (32, 5),
    ("bfloat16", "backward"): (32, 4),
    ("float16", "forward"): (32, 5),
    ("float16", "backward"): (32, 4),
    ("float32", "forward"): (24, 4),
    ("float32", "backward"): (16, 4),
}
_MANY_WARPS, _FEW_WARPS = 8, 4
#: Widths of columns that leave few of a CTA's 256 threads idle, for rows of more channels than the first width.
_ACROSS = (32, 36, 42, 51, 64)
#: Steps of a thread below which a tile is to have several batches; the second number where a tile would have one whole batch, and
#: all batches have more than the third number of elements.
_LEAST_STEPS, _MORE_STEPS, _MANY_ELEMENTS = 8, 16, 1 << 21
#: Steps of a thread, at least, in a tile of several batches.
_JOINED_STEPS = 4
_PIECE = 16
#: Channels of misaligned rows up to which kernels that scan columns serially have too many idle threads.
_NARROW_ROW = 32
#: Columns of 64 misaligned channels below which kernels that scan them serially leave so many SMs idle that looking back is faster,
#: by the bytes of an element.
_FEW_COLUMNS = {2: 56, 4: 64}
_MISALIGNED_COLUMN = 64
#: Steps below which a column-serial kernel has no time to lose.
_LEAST_TIME = 512
#: Steps of one tile of a column-serial kernel. It has a CTA for each batch: batches up to which that is faster for so few steps, of
#: few channels, and from which it is slower for one column of more.
_ONE_TILE, _FEW_BATCHES, _TOO_MANY_BATCHES = 64, 700, 1000
#: Aligned rows of many batches: bytes of a row, and time steps for elements of two bytes, up to which, and steps of any row of few
#: channels below which column-serial kernels have too many idle threads. Elements of such short rows of float32 from which it is
#: faster for any number of batches. Batches for each step from which it is for up to so many steps, and bytes of a row.
_MANY_BATCHES, _SHORT_ROW, _SHORT_TIME, _FEW_STEPS = 1500, 16, 128, 16
_LEAST_ELEMENTS = 200_000
_BATCHES_OF_STEP, _MORE_STEPS_OF_BATCH, _HALF_LINE = 120, 64, 64
#: Packed sequences: elements that take as long as a launch, and those that take as long as other kernels take for the longest
#: sequence, for each step of the mean: columns of aligned sequences, or Triton's programs. Channels from which generic kernels are
#: faster, which take all sequences in turn.
_LAUNCH, _ALIGNED_STEP, _MISALIGNED_STEP, _MANY_CHANNELS = 1.5e6, 3800, 30_000, 2000
#: Rows, channels and tiles, which the kernel numbers in 32 bits.
_MOST = 2**31 - 1
#: Tiles of a group, and groups of a group of the next level.
_GROUP = 32
#: Bytes of a workspace so small, and tiles so few, that one CTA zeroes the workspace while others load.
_FEW_BYTES, _FEW_TILES = 1 << 16, 512
#: Rows of few channels with so few elements that most SMs would be idle have tiles of fewer steps, and more of them.
_FEW_ELEMENTS, _FEWER_STEPS, _BUSY = 1 << 19, 15, 128
#: Channels up to which tiles of few warps are faster.
_FEWEST_CHANNELS = 8


def tiles(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Those that every wheel holds, if there are some: of many warps, and of few."""
    if (dtype, direction) in _STEPS_AND_BLOCKS:
        steps, blocks = _STEPS_AND_BLOCKS[dtype, direction]
        yield {"warps": _MANY_WARPS, "steps": steps, "blocks": blocks}
        yield {"warps": _FEW_WARPS, "steps": steps, "blocks": 2 * blocks}


def sums(variant: Variant) -> bool:
    return True


def shared(direction: Direction, variant: Variant) -> int:
    """Bytes of the tiles of all inputs."""
    return (2 if direction == "forward" else 3) * _area(variant)


def _area(variant: Variant) -> int:
    """Bytes of the tile of one tensor."""
    threads = 32 * variant.number("warps")
    return threads * variant.number("steps") * ITEM_SIZE[variant.text("dtype")]


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why it does not solve a problem, or is not the fastest for it."""
    tiles = launch(variant, problem, 0).grid[0]
    most = max(problem.batch * problem.time, problem.channels, tiles)
    if most > _MOST or problem.outer > MOST_ALONG_Y:
        return f"more than {_MOST} rows, channels or tiles, or {MOST_ALONG_Y} outer batches"
    if problem.sequences:
        return _refuses_packed(problem)
    if _is_alone(problem):
        return None
    if problem.whole_chunks(problem.chunk()):
        return None if _short_rows(problem) else "rows are aligned, and not short in many batches"
    if problem.dtype == "float32" and narrow.accepts(variant, problem) is None:
        return "kernels for narrow rows are faster"
    return _column_serial_is_faster(problem)


def _is_alone(problem: LinearScanProblem) -> bool:
    """Whether only generic kernels, whose tiles wait for one another in turn, take it beside this one."""
    return problem.shares_gates() or problem.outer > 1


def packs(problem: LinearScanProblem) -> bool:
    """Whether packed sequences go to such tiles."""
    has_tiles = (problem.dtype, problem.direction) in _STEPS_AND_BLOCKS
    return has_tiles and problem.plain(widely=True) and _refuses_packed(problem) is None


def _refuses_packed(problem: LinearScanProblem) -> str | None:
    """Why it does not take packed sequences, or is not the fastest for them."""
    if problem.sums:
        return "tiles do not sum the gradient of gates over sequences"
    rows = problem.scans
    mean = problem.time / problem.sequences
    if rows > _MANY_CHANNELS:
        return f"{rows} channels: kernels that take sequences in turn are faster"
    is_aligned = problem.whole_chunks(problem.chunk()) and not _is_alone(problem)
    if is_aligned and problem.channels * ITEM_SIZE[problem.dtype] <= _SHORT_ROW:
        return None
    step = _ALIGNED_STEP if is_aligned else _MISALIGNED_STEP
    if rows * problem.time + _LAUNCH > step * mean:
        return "sequences are many or short: kernels that scan each by itself are faster"
    return None


def _column_serial_is_faster(problem: LinearScanProblem) -> str | None:
    """Why a kernel that scans misaligned columns serially is faster, if one takes the problem: rows have to lie alike in all
    tensors for that, and gates to change with time."""
    if not problem.congruent() or problem.has_one_gate():
        return None
    is_short, batches = 1 < problem.time <= _ONE_TILE, problem.batch
    if problem.channels <= _NARROW_ROW and problem.time > 1:
        if not is_short or batches > _FEW_BATCHES:
            return None
    elif is_short and problem.channels <= _MISALIGNED_COLUMN and batches >= _TOO_MANY_BATCHES:
        return None
    columns = problem.batch * ceil_div(problem.channels, _MISALIGNED_COLUMN)
    if columns < _FEW_COLUMNS[ITEM_SIZE[problem.dtype]] and problem.time >= _LEAST_TIME:
        return None
    return f"{columns} columns of {problem.time} steps: kernels that scan them serially are faster"


def _short_rows(problem: LinearScanProblem) -> bool:
    """Whether many batches have rows of so few bytes, or so few rows, that a tile of other kernels is mostly empty."""
    item = ITEM_SIZE[problem.dtype]
    is_short = problem.channels * item <= _SHORT_ROW
    if is_short and item == 4 and _elements(problem) >= _LEAST_ELEMENTS:
        return problem.time > 1
    if problem.batch < _MANY_BATCHES or problem.time == 1:
        return False
    if is_short:
        return item == 4 or problem.time < _SHORT_TIME
    few = problem.channels <= _NARROW_ROW and problem.time < _FEW_STEPS
    many = problem.batch >= _BATCHES_OF_STEP * problem.time and problem.time <= _MORE_STEPS_OF_BATCH
    return (few or (many and problem.channels * item <= _HALF_LINE)) and not problem.sums


def times(variant: Variant) -> int:
    """Time steps of a tile of 32 channels."""
    return variant.number("warps") * variant.number("steps")


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """It takes only what it is the fastest for. Tiles that have all of a batch, or of several, are the fastest. Of these, and for few
    channels, few warps are: a thread then has more rows, and fewer threads wait for one another."""
    shape = tile_shape(variant, problem)
    whole = shape.joined or shape.times >= problem.time
    few = whole or problem.channels <= _FEWEST_CHANNELS
    return -1.0 - 2 * whole - (variant.number("warps") == (_FEW_WARPS if few else _MANY_WARPS))


class TileShape(NamedTuple):
    """How the tiles of a launch lie.

    across  channels side by side
    slots   threads one after the other in time
    steps   of a thread
    joined  whether batches follow one another in a column
    dense   whether no gaps lie between rows
    """

    across: int
    slots: int
    steps: int
    joined: bool
    dense: bool

    def flags(self) -> int:
        return self.across | self.steps << 10 | self.joined << 18 | self.dense << 19

    @property
    def times(self) -> int:
        return self.slots * self.steps


def tile_shape(variant: Variant, problem: LinearScanProblem) -> TileShape:
    """That of the columns of which the fewest threads are idle. Columns of many channels have fewer rows in a tile, so more maps are
    read for each row; of columns of few, more sectors are shared with the column beside."""
    numbers = {ceil_div(problem.channels, across) for across in _ACROSS}
    shapes = [_of_columns(variant, problem, number) for number in sorted(numbers)]
    # A tile is to have no fewer steps than there is room for a sum of.
    while problem.sums and shapes[-1].times < min(SUM_STEPS, problem.time):
        shapes.append(
            _of_columns(variant, problem, ceil_div(problem.channels, shapes[-1].across - 1))
        )
    if problem.sums:
        shapes = [s for s in shapes if s.times >= min(SUM_STEPS, problem.time)]
    item = ITEM_SIZE[problem.dtype]

    def cost(shape: TileShape) -> float:
        columns = ceil_div(problem.channels, shape.across)
        threads = columns * 32 * variant.number("warps") / (problem.channels * shape.slots)
        sectors = 1.0 if shape.dense else 1 + 30 / (shape.across * item)
        return threads * sectors * (1 + 80 / (item * shape.times))

    return min(shapes, key=cost)


def _elements(problem: LinearScanProblem) -> int:
    return problem.scans * problem.time


def _is_small(problem: LinearScanProblem, across: int, most: int) -> bool:
    """Whether rows have few elements, and a batch more than one tile of many warps."""
    return (
        problem.channels <= _NARROW_ROW
        and _elements(problem) <= _FEW_ELEMENTS
        and problem.time > 32 * _MANY_WARPS // across * most
        and not problem.sums
    )


def _of_columns(variant: Variant, problem: LinearScanProblem, number: int) -> TileShape:
    across, item = ceil_div(problem.channels, number), ITEM_SIZE[problem.dtype]
    slots = 32 * variant.number("warps") // across
    gates, *rows = problem.sequence_strides()
    if not problem.has_one_gate() and not problem.shares_gates():
        rows.append(gates)
    dense = number == 1 and all(strides.time == problem.channels for strides in rows)
    pitch = across * item if dense else across * item + 3 * _PIECE - 2 * item
    # One row more before the tile, and one after it.
    left = _area(variant) - 2 * ceil_div(pitch, _PIECE) * _PIECE - 2 * _PIECE
    most = min(variant.number("steps"), left // pitch // slots)
    odd = across < _ACROSS[0]  # so that few threads have the same bank of shared memory
    if odd:
        most -= 1 - most % 2
    tiles = ceil_div(problem.time, slots * most)
    if _is_small(problem, across, most):
        busy = min(
            ceil_div(problem.time, slots * _FEWER_STEPS),
            _BUSY // (problem.outer * problem.batch * number),
        )
        tiles = max(tiles, busy)
    steps = most if tiles > 1 and problem.sums else ceil_div(problem.time, slots * tiles)
    many = tiles == 1 and _elements(problem) > _MANY_ELEMENTS
    if steps < (_MORE_STEPS if many else _LEAST_STEPS) and _follow(problem):
        busy = ceil_div(problem.batch * problem.time, slots * _BUSY)
        return TileShape(across, slots, min(most, max(_JOINED_STEPS, busy) | odd), True, dense)
    return TileShape(across, slots, steps | odd, False, dense)


def _follow(problem: LinearScanProblem) -> bool:
    """Whether the rows of a batch follow those of the one before, in all tensors. Gates that are shared by all rows do."""
    sequences = problem.sequence_strides()
    follow = all(strides.batch == problem.time * strides.time for strides in sequences)
    plain = not problem.sums and not problem.sequences
    return follow and problem.outer == 1 and problem.batch > 1 and problem.time > 1 and plain


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """A CTA for each tile; outer batches lie along y, each with a workspace of its own."""
    shape = tile_shape(variant, problem)
    batches, time = (
        (1, problem.batch * problem.time) if shape.joined else (problem.batch, problem.time)
    )
    columns = batches * ceil_div(problem.channels, shape.across)
    groups = [ceil_div(time, shape.times)]
    ctas, shape_flags = columns * groups[0], shape.flags()
    if groups[0] == 1:
        return Launch((ctas, problem.outer, 1), problem.scalars(shape_flags), pieces=1)
    pieces = groups[0]
    while groups[-1] > 1:
        groups.append(ceil_div(groups[-1], _GROUP))
    own = HEAD + columns * shape.across * sum(groups) * _map_bytes(problem.dtype)
    zeroed = own > _FEW_BYTES or ctas > _FEW_TILES
    scalars = problem.scalars(shape_flags | (not zeroed) << 20 | own // _PIECE << 21)
    grid = ctas if zeroed else 1 + ctas, problem.outer, 1
    return Launch(grid, scalars, problem.outer * own, zeroed, pieces)


def _map_bytes(dtype: str) -> int:
    """Of a map in memory: pieces of 16 bytes, each of three words and a flag."""
    parts = 3 if ITEM_SIZE[dtype] >= 4 else 2  # with the error term of the product
    return 16 * ceil_div(parts * ITEM_SIZE[state_dtype(dtype)] // 4, 3)
