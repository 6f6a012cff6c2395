"""Scans with one gate a channel for all time steps, of few channels, that shared memory has room for, or nearly
(``resident.cuh``): the tile, what takes it, and how it launches. The kernel can scan 32 channels; with more than 8 others are faster.

Each warp of the GPU has a run of time steps. Runs exchange the states that they end with once, so that the scan takes as long as its
bytes, and little more. Rows of contiguous time are batches of one channel.
"""

from __future__ import annotations

from collections.abc import Iterator

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.problem import (
    Direction,
    LinearScanProblem,
    ceil_div,
)
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.linear_scan.streams import HEAD
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: Steps of a lane in a chunk: one more than there are banks of shared memory.
_STEPS = 33
#: By the direction, warps, chunks that a warp keeps, and CTAs for each SM.
_WARPS_CHUNKS_BLOCKS: dict[Direction, tuple[int, int, int]] = {
    "forward": (8, 3, 2),
    "backward": (8, 2, 2),
}
#: The most channels, a lane for each.
_LANES = 32
#: Bytes of static shared memory, with what some drivers keep, at most.
_STATIC = 8192
#: Bytes of a published shift, and of the smallest copy; and of a row of banks of shared memory.
_PIECE, _BANKS = 16, 128
#: Of contiguous channels: how many there may be, and how many of them make rows so narrow that other kernels take part of a sector at a
#: time; steps below which other kernels are faster; and bytes of an input below which wider rows are, as CTAs exchange states, and above
#: which all are, as much is read twice.
_CHANNELS, _NARROW, _LEAST_TIME, _BYTES = 8, 3, 1024, (12e6, 60e6)
#: Aligned scans beyond which kernels that pass over columns serially are faster.
_MANY_SCANS = 1024
#: Rows of contiguous time that keep all SMs busy, none of which several CTAs share, and their steps.
_ROWS, _TIMES = (200, 132 * 16), (1024, 4096)
#: Steps that it numbers, with those of a run beyond; and bits of the flags for the chunks of a run.
_MOST_STEPS, _CHUNK_BITS = 2**31 - 2**24, 24


def tiles(direction: Direction, dtype: str) -> Iterator[Tile]:
    """The one that every wheel holds, of float32."""
    if dtype == "float32" and direction in _WARPS_CHUNKS_BLOCKS:
        warps, chunks, blocks = _WARPS_CHUNKS_BLOCKS[direction]
        yield {"warps": warps, "steps": _STEPS, "chunks": chunks, "blocks": blocks}


def sums(variant: Variant) -> bool:
    return True


def shared(direction: Direction, variant: Variant) -> int:
    return ring_bytes(direction, variant.text("dtype"), dict(variant.statics))


def ring_bytes(direction: Direction, dtype: str, tile: Tile) -> int:
    """Of the chunks of all warps; backward each has one more, of states."""
    area = _LANES * _STEPS * ITEM_SIZE[dtype] + _BANKS
    return int(tile["warps"]) * (int(tile["chunks"]) + (direction == "backward")) * area


def serves(direction: Direction, dtype: str, tile: Tile, target: Target) -> bool:
    """Whether GPUs have bulk copies, and room."""
    fits = ring_bytes(direction, dtype, tile) + _STATIC <= target.shared_memory
    return fits and not target.is_ptx and target.capability >= (9, 0)


def times(variant: Variant) -> int:
    """Time steps of a chunk of one channel."""
    return _LANES * _STEPS


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why it does not solve a problem, or is not the fastest for it."""
    if not problem.has_one_gate():
        return "gates change with time"
    if problem.direction == "backward" and not problem.sums:
        return "it sums the gradient of gates"
    return _exceeds(problem) or _others_are_faster(problem)


def _exceeds(problem: LinearScanProblem) -> str | None:
    """Why rows are not what it needs, or too many."""
    if problem.outer > 1:
        return "batches do not fold into one dimension"
    if channels(problem) > _LANES:
        return f"{problem.channels} channels; it takes {_LANES}"
    if problem.layout == "channel_last" and any(
        strides.time != problem.channels for strides in problem.rows_strides()[1:]
    ):
        return "rows do not follow one another without gaps"
    if not _congruent(problem):
        return "results lie in their pieces of 16 bytes otherwise than inputs"
    if problem.time > _MOST_STEPS or batches(problem) > _MOST_STEPS // _LANES:
        return f"more than {_MOST_STEPS} steps, or {_MOST_STEPS // _LANES} batches"
    return None


def _congruent(problem: LinearScanProblem) -> bool:
    """Whether a result lies at the same place of its piece as its input."""
    names = ("tokens", "states") if problem.direction == "forward" else ("states_grad", "grads")
    inputs, results = (vars(problem.strides_of(name)).values() for name in names)
    apart = (a - b for a, b in zip(inputs, results, strict=True))
    item = ITEM_SIZE[problem.dtype]
    return problem.alignment >= _PIECE and all(by * item % _PIECE == 0 for by in apart)


def _others_are_faster(problem: LinearScanProblem) -> str | None:
    if problem.layout == "time_last":
        rows_are_few_or_many = not _ROWS[0] <= batches(problem) <= _ROWS[1]
        if rows_are_few_or_many or not _TIMES[0] <= problem.time <= _TIMES[1]:
            return "rows are few or many, short or long: kernels that stream rows are faster"
        return None
    least, most = _BYTES
    size = problem.scans * problem.time * ITEM_SIZE[problem.dtype]
    is_small = size < least and problem.channels > _NARROW
    if problem.channels > _CHANNELS or problem.time < _LEAST_TIME or is_small or size > most:
        return "channels are more, steps few, or bytes so many that they are read from memory twice"
    if problem.scans > _MANY_SCANS and problem.whole_chunks(problem.chunk()):
        return f"{problem.scans} scans: kernels that pass over columns serially are faster"
    return None


def channels(problem: LinearScanProblem) -> int:
    """Of a batch; contiguous time counts as one channel."""
    return problem.channels if problem.layout == "channel_last" else 1


def batches(problem: LinearScanProblem) -> int:
    """Of scans that are side by side in memory."""
    return problem.scans // channels(problem)


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """It takes only what it is the fastest for."""
    return -1e8


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """As many CTAs as the GPU has room for, or fewer, and one in front that zeroes the workspace where several share a batch."""
    warps, scans = variant.number("warps"), batches(problem)
    slots = 1 << (_LANES // channels(problem)).bit_length() - 1
    steps = slots * variant.number("steps")
    chunks = ceil_div(problem.time, steps)
    runs = max(1, (sm_count * variant.number("blocks") - 1) * warps // scans)
    runs = runs // warps * warps if runs >= warps else 1 << runs.bit_length() - 1
    of_run = ceil_div(chunks, runs)
    needed = ceil_div(chunks, of_run)
    runs = ceil_div(needed, warps) * warps if needed > warps else 1 << (needed - 1).bit_length()
    ctas = ceil_div(scans * runs, warps)
    shared = runs > warps
    workspace = HEAD + ctas * channels(problem) * _PIECE if shared else 0
    scalars = problem.scalars(of_run | runs << _CHUNK_BITS)
    return Launch((ctas + shared, 1, 1), scalars, workspace, not shared, max(1, runs // warps))
