"""Misaligned rows of 16-bit elements, in columns of 64 or 128 channels that several CTAs share (``multi_cta_column.cuh``): the tiles,
what takes them, and how they launch.

They are for few columns, of which each has as many CTAs as there is room for, up to ``ctas_per_column``. The rings for aligned rows
are in ``rings.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from scan_registry.kernels.linear_scan import rings, streams
from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem, ceil_div
from scan_registry.kernels.linear_scan.space import MULTI_CTA, Tile
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: SMs of an H100 or H200. The kernel was timed on an H200, and the limits below are of such GPUs.
_SMS = 132
#: The least CTAs of a column.
_LEAST_CTAS = 2
#: Steps for each CTA of a column, up to which the product of scans and CTAs of a column is to be at least so large: below, tiles that
#: look back are faster. Channels up to which only the last of these counts.
_LEAST_SCANS = ((128, 0), (256, 2000), (math.inf, 4400))
_FEW_CHANNELS = 32
#: The least CTAs of a wide column: with two, columns that one CTA scans are as fast.
_LEAST_WIDE_CTAS = 3
#: The most CTAs of a column, by the tile. Columns that have no room for more than the first are 2 to 10% faster with that tile.
_FEW_CTAS, _MANY_CTAS = 4, 8
#: Steps below which columns that one CTA scans are as fast, by whether narrow columns have no more CTAs than the least number.
_LEAST_TIME = {False: 256, True: 512}
#: Channels of a narrow column. A wide one has twice as many, so fewer columns lie side by side and share sectors of memory.
_CHANNELS = 64
#: Channels of a thread in narrow and wide columns. Of wide ones, the steps of a thread.
_NARROW, _WIDE = 2, 4
_STEPS: dict[Direction, tuple[int, int]] = {"forward": (16, 8), "backward": (12, 6)}
#: Stages, and turns from the composition of a tile to its scan.
_STAGES, _LEAD = 4, 2


def tiles(direction: Direction, dtype: str) -> Iterator[Tile]:
    """The tiles of this access, which archives of capability 9.0 hold and the JIT compiles for other GPUs."""
    narrow, wide = _STEPS[direction]
    column = {"warps": 8, "lanes_across": 32}
    rings_of = {"stages": _STAGES, "aggregate_lead": _LEAD}
    for vector, steps, ctas in (
        (_NARROW, narrow, _FEW_CTAS),
        (_NARROW, narrow, _MANY_CTAS),
        (_WIDE, wide, _MANY_CTAS),
    ):
        if ITEM_SIZE[dtype] == 2:
            tile = {**column, "vector": vector, "steps": steps, **rings_of, "ctas_per_column": ctas}
            yield from rings.resident(direction, dtype, tile, 1, MULTI_CTA)


def sums(variant: Variant) -> bool:
    return False


def shared(direction: Direction, variant: Variant) -> int:
    return streams.shared(direction, variant)


def times(variant: Variant) -> int:
    """Time steps that a tile covers."""
    return streams.times(variant)


def _columns(variant: Variant, problem: LinearScanProblem) -> int:
    return problem.batch * ceil_div(problem.channels, streams.scans(variant))


def _ctas(variant: Variant, problem: LinearScanProblem, sm_count: int) -> int:
    """How many share a column, on a GPU that runs one on each SM."""
    return min(variant.number("ctas_per_column"), sm_count // _columns(variant, problem))


def _narrow_ctas(problem: LinearScanProblem) -> int:
    """CTAs of a narrow column that there is room for."""
    return _SMS // (problem.batch * ceil_div(problem.channels, _CHANNELS))


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why it does not solve a problem, or is not the fastest for it."""
    if problem.whole_chunks(problem.chunk()) or not problem.congruent():
        return "rows are aligned, or lie at other offsets to 16 bytes in some tensors"
    if problem.sums or problem.has_one_gate():
        return "each channel has one gate for all time steps"
    ctas = _ctas(variant, problem, _SMS)
    if ctas < _LEAST_CTAS:
        return f"{_columns(variant, problem)} columns; a GPU has no room for several CTAs of each"
    if reason := _other_columns_are_faster(variant, problem, ctas):
        return reason
    steps, scans = problem.time / ctas, problem.batch * problem.channels
    *_, (_, least) = _LEAST_SCANS
    if problem.channels > _FEW_CHANNELS:
        least = next(scans for most, scans in _LEAST_SCANS if steps <= most)
    if problem.time < _LEAST_TIME[_narrow_ctas(problem) <= _LEAST_CTAS] or scans * ctas < least:
        return "tiles that look back are faster for so few scans or steps"
    return None


def _other_columns_are_faster(
    variant: Variant, problem: LinearScanProblem, ctas: int
) -> str | None:
    """Why other columns, or a tile for fewer CTAs, are faster than so many CTAs of each column."""
    if variant.number("vector") == _WIDE:
        narrow = _narrow_ctas(problem)
        if ctas < max(2 * narrow, _LEAST_WIDE_CTAS):
            return f"a GPU has room for {narrow} CTAs of each narrow column; these are faster"
    elif ctas <= _FEW_CTAS < variant.number("ctas_per_column"):
        return f"a GPU has room for {ctas} CTAs of each column; a tile for as few is faster"
    return None


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """Below the costs of all other kernels: ``accepts`` leaves only problems for which this kernel is the fastest, the more CTAs
    and channels the faster."""
    return -float(variant.number("ctas_per_column") * variant.number("vector"))


def exceeds_residency(variant: Variant, problem: LinearScanProblem, sm_count: int) -> str | None:
    """Why a GPU does not hold several CTAs of each column at once, which wait for one another."""
    if _ctas(variant, problem, sm_count) < _LEAST_CTAS:
        return f"{_columns(variant, problem)} columns; {sm_count} SMs run no {_LEAST_CTAS} blocks of each at once"
    return None


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """As many CTAs for each column as run at once. The kernel reads how many from its flags."""
    ctas = max(_LEAST_CTAS, _ctas(variant, problem, sm_count))
    blocks = _columns(variant, problem) * ctas
    workspace = streams.descriptor_bytes(variant, blocks)
    return Launch((blocks, 1, 1), problem.scalars(ctas), workspace)
