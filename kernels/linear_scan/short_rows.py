"""Short rows of contiguous time that follow one another without gaps, and are not all aligned (``short_rows.cuh``): the tiles,
what takes them, and how they launch.

A CTA has a tile of whole rows, each of which some lanes share. So nothing is exchanged between CTAs, and tiles are copied as they
lie in memory, wherever rows start. A row may have one gate for all steps, which lies anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem, ceil_div
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: By the bytes of an element and the direction: pairs of the most steps of a thread, and CTAs for each SM. The first one that has
#: room for a row takes it.
_STEPS_AND_BLOCKS: dict[tuple[int, Direction], tuple[tuple[int, int], ...]] = {
    (2, "forward"): ((34, 5),),
    (2, "backward"): ((20, 6), (34, 4)),
    (4, "forward"): ((20, 5),),
    (4, "backward"): ((20, 3),),
}
#: The most steps of aligned rows of which the gradient of gates is summed, by the bytes of an element. Of longer ones of 16-bit
#: elements, variants for aligned rows are faster.
_SUMMED_TIME = {2: 512, 4: 640}
#: Aligned rows: steps from which there are to be many rows, and how many; the most steps of 16-bit elements backward if two lanes read
#: the same bank of shared memory.
_LONG_ROW, _MANY_ROWS, _SHORT_ROW = 200, 1 << 14, 48
#: Numbers of lanes that may share a row, steps of a lane above which more lanes share it, and threads of a launch below which more
#: do unless they have few steps: as many as an H100 or H200 has with a CTA on each SM.
_LANES, _MANY_STEPS, _THREADS, _FEW_STEPS = (1, 2, 4, 8, 16, 32), 20, 132 * 256, 5
#: Numbers of steps that a lane may have for one number of lanes, and how many reads of shared memory take as long as what a thread
#: does beside its steps.
_PADDED, _BESIDE_STEPS = 3, 16
#: Bytes of a piece. One lies after the tiles, since a thread may read the element after its row.
_PIECE = 16
#: Rows that the kernel counts.
_MOST_ROWS = 2**31 - 1


def tiles(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Those that every wheel holds."""
    for steps, blocks in _STEPS_AND_BLOCKS.get((ITEM_SIZE[dtype], direction), ()):
        yield {"warps": 8, "steps": steps, "blocks": blocks}


def sums(variant: Variant) -> bool:
    """Where rows have one gate."""
    return True


def shared(direction: Direction, variant: Variant) -> int:
    """Bytes of the tiles of all inputs."""
    threads = 32 * variant.number("warps")
    area = threads * variant.number("steps") * ITEM_SIZE[variant.text("dtype")]
    return (2 if direction == "forward" else 3) * area + _PIECE


def times(variant: Variant) -> int:
    """The most time steps of a row."""
    return _LANES[-1] * variant.number("steps")


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why it does not solve a problem, or is not the fastest for it."""
    if problem.time > times(variant):
        return f"{problem.time} steps; it takes {times(variant)}"
    aligned = problem.whole_chunks(problem.chunk()) and not _is_faster_for_aligned(problem)
    if problem.alignment < _PIECE or aligned:
        return "rows are aligned, or tensors start off a 16-byte boundary"
    if problem.batch * problem.channels > _MOST_ROWS or not _follow(problem):
        return "rows do not follow one another without gaps"
    return None


def _is_faster_for_aligned(problem: LinearScanProblem) -> bool:
    """Whether few lanes read the same banks; or rows have one gate, and no variant for aligned rows is fast: backward none that sums
    the gate's gradient where rows are short, and forward few if batches share gates."""
    item, time = ITEM_SIZE[problem.dtype], problem.time
    if problem.sums:
        return time <= _SUMMED_TIME[item]
    forward = problem.direction == "forward"
    if problem.has_one_gate():
        gates = problem.strides_of("gates")
        return forward and problem.batch > 1 and gates.batch != gates.channel * problem.channels
    rows = problem.batch * problem.channels
    lanes, steps = lanes_and_steps(rows, time, item)
    reads = _wavefronts(time, item, lanes, steps)
    if reads > 2 or (time >= _LONG_ROW and rows < _MANY_ROWS):
        return False
    if item > 2:
        return reads == 1 or time >= _LONG_ROW
    if forward:
        return reads == 1 and lanes < _LANES[-1]
    return reads == 1 or time <= _SHORT_ROW


def _follow(problem: LinearScanProblem) -> bool:
    """Whether rows, and the states of rows, follow one another."""
    rows, states = problem.rows_strides(), problem.strides[-1]
    batch = problem.channels * problem.time
    return (
        (problem.channels == 1 or all(s.channel == problem.time for s in rows))
        and (problem.batch == 1 or all(s.batch == batch for s in rows))
        and (problem.batch == 1 or states.batch == problem.channels * states.channel)
    )


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """Below the costs of all other kernels, and the smaller the fewer steps a thread may have, so that more CTAs share an SM."""
    return variant.number("steps") - 1e7


@cache
def lanes_and_steps(rows: int, time: int, item: int) -> tuple[int, int]:
    """How many lanes share a row of elements of so many bytes, and how many steps a lane has: such that threads have little to do
    beside their steps, lanes of a warp seldom read the same bank of shared memory, which some steps too many may change, and
    every SM has a CTA."""
    numbers = [
        lanes
        for lanes in _LANES
        if (steps := ceil_div(time, lanes)) <= _MANY_STEPS
        and (rows * lanes >= _THREADS or steps <= _FEW_STEPS)
    ]
    choices = [
        (lanes, ceil_div(time, lanes) + more)
        for lanes in numbers[:2] or [_LANES[-1]]
        for more in range(_PADDED if lanes > 1 else 1)
    ]

    def cost(choice: tuple[int, int]) -> int:
        lanes, steps = choice
        return lanes * (_BESIDE_STEPS + steps * (1 + _wavefronts(time, item, lanes, steps)))

    return min(choices, key=cost)


def _wavefronts(time: int, item: int, lanes: int, steps: int) -> int:
    """How often shared memory is read for the first step of each of a warp's lanes: once for each word of the same bank."""
    of_bank: dict[int, set[int]] = {}
    for thread in range(32):
        word = (thread // lanes * time + thread % lanes * steps) * item // 4
        of_bank.setdefault(word % 32, set()).add(word)
    return max(map(len, of_bank.values()))


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """A CTA for each tile."""
    rows = problem.batch * problem.channels
    lanes, steps = lanes_and_steps(rows, problem.time, ITEM_SIZE[problem.dtype])
    ctas = ceil_div(rows * lanes, 32 * variant.number("warps"))
    return Launch((ctas, 1, 1), problem.scalars(lanes | steps << 8), pieces=1)
