"""At most 32 contiguous channels of float32, in rows without gaps that start at any address (``narrow_columns.cuh``): the
tile, what takes it, and how it launches.

One warp scans the channels of a batch, a thread each. Two copy tiles in, through a ring of ``stages``, and two copy results out.
"""

from __future__ import annotations

from collections.abc import Iterator

from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: Bytes of a tile of one tensor.
AREA = 4096
#: The most channels, a lane of the scanning warp for each, and the fewest, below which most of these lanes are idle, so that tiles
#: that look back are faster: backward, and forward where one has all of a batch, in elements.
_CHANNELS, _LEAST_CHANNELS, _ONE_TILE = 32, 8, 5000
#: The fewest channels otherwise.
_FEWEST_CHANNELS = 6
#: Batches, and elements of a batch, below which other kernels are faster: there is a CTA for each batch.
_LEAST_BATCHES, _LEAST_ELEMENTS = 192, 512


def tiles(direction: Direction, dtype: str) -> Iterator[Tile]:
    """The one that every wheel holds, of float32."""
    if dtype == "float32":
        stages, blocks = (5, 4) if direction == "forward" else (4, 3)
        yield {"warps": 5, "stages": stages, "blocks": blocks}


def shared(direction: Direction, variant: Variant) -> int:
    return ring_bytes(direction, dict(variant.statics))


def ring_bytes(direction: Direction, tile: Tile) -> int:
    """Bytes of the ring of a CTA, and of two tiles of its results."""
    inputs, results = (2, 1) if direction == "forward" else (3, 2)
    return AREA * (int(tile["stages"]) * inputs + 2 * results)


def sums(variant: Variant) -> bool:
    return False


def times(variant: Variant) -> int:
    """Time steps of a tile that has as many channels as it can."""
    return AREA // (_CHANNELS * ITEM_SIZE[variant.text("dtype")])


def _fits_rows(problem: LinearScanProblem) -> bool:
    """Whether rows follow one another without gaps, and not all are aligned."""
    return (
        problem.time > 1
        and not problem.whole_chunks(problem.chunk())
        and all(strides.time == problem.channels for strides in problem.rows_strides())
    )


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why a problem has other rows, or is too wide, or too small."""
    if not _fits_rows(problem):
        return "rows do not follow one another without gaps, or all are aligned"
    one_tile = problem.channels * problem.time <= _ONE_TILE
    least = _LEAST_CHANNELS if problem.direction == "backward" or one_tile else _FEWEST_CHANNELS
    if not least <= problem.channels <= _CHANNELS:
        return f"{problem.channels} channels; it takes {least} to {_CHANNELS}"
    if problem.channels * problem.time < _LEAST_ELEMENTS:
        return "tiles that have several batches are faster"
    if problem.batch < _LEAST_BATCHES:
        return f"{problem.batch} batches would leave most of a GPU idle"
    return None


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """It takes only what it is the fastest for."""
    return -1.0


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """A CTA for each batch."""
    return Launch((problem.batch, 1, 1), problem.scalars())
