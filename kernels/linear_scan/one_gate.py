"""Long rows of contiguous time, each of which has one gate for all steps, cut into segments (``time_stream.cuh``, ``ONE_GATE``): the
tile, what takes it, and how it launches.

Gates stay in registers. So tiles in shared memory have no gates, and a CTA keeps more of what it reads in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

from scan_registry.kernels.linear_scan import rings, streams
from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem
from scan_registry.kernels.linear_scan.space import ONE_GATE, Tile
from scan_registry.kernels.model import Variant

#: By the direction, warps that own tiles, and stages. Archives have room for one dtype.
_ROWS_AND_STAGES: dict[Direction, tuple[int, int]] = {"forward": (20, 4), "backward": (12, 4)}
#: The cost without tuning.
_LAST = 1e6

sums, times, launch = streams.takes_one_gate, streams.times, streams.launch


def tiles(direction: Direction, dtype: str) -> Iterator[Tile]:
    """The one that every wheel holds, if there is one."""
    if dtype == "float32" and direction in _ROWS_AND_STAGES:
        rows, stages = _ROWS_AND_STAGES[direction]
        tile = {"warps": 1, "rows": rows, "lanes": 32, "pieces": 4, "stages": stages}
        yield {**tile, "prefix_lead": 2, "blocks": 1}


def shared(direction: Direction, variant: Variant) -> int:
    return rings.shared(direction, variant.text("dtype"), ONE_GATE, dict(variant.statics))


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why it does not solve a problem."""
    if not problem.has_one_gate():
        return "gates change with time"
    if problem.direction == "backward" and not problem.sums:
        return "it sums the gradient of gates"
    if not problem.whole_chunks(problem.chunk()):
        return f"rows do not lie in chunks of {problem.chunk()} {problem.dtype} as it needs them"
    return streams.refuses(variant, problem)


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """It is chosen where the timing model says that it is the fastest, and nowhere else."""
    return _LAST
