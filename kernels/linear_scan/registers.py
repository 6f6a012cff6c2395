"""CUDA variants whose tiles are held in registers: those without a number of ``stages``.

In time-last kernels ``warps`` share a row, which may be misaligned, a CTA has ``rows`` rows, and a lane holds
``steps`` chunks. In channel-last kernels ``lanes`` lie along the channels, and each holds ``vector`` channels of
``steps`` time steps. The sources are ``time_last.cuh`` and ``channel_last.cuh``.
"""

from __future__ import annotations

from scan_registry.kernels.linear_scan import streams
from scan_registry.kernels.linear_scan.problem import (
    ONE_GATE,
    Direction,
    LinearScanProblem,
    ceil_div,
    state_dtype,
)
from scan_registry.kernels.linear_scan.space import MISALIGNED, Tile
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: The usual tile of generic access: 32 channels wide, so that many run side by side.
WIDE: Tile = {"warps": 8, "lanes": 32, "vector": 1, "steps": 8}


def time_last_tiles() -> tuple[Tile, ...]:
    """Warps that share a row, rows per block, chunks a lane holds."""
    short: Tile = {"warps": 1, "rows": 4, "steps": 1}
    return short, {"warps": 4, "rows": 1, "steps": 2}


def time_last_tile(variant: Variant) -> int:
    chunk = 16 // ITEM_SIZE[variant.text("dtype")]
    return variant.number("warps") * variant.number("steps") * 32 * chunk


def walk_cost(variant: Variant, problem: LinearScanProblem, tile: int) -> float:
    """Prefers the largest tile if a row has at least half as many tiles as a tile has warps, else the smallest.

    The warps of a tile wait for each other at a barrier. The more warps, the more tiles it takes to hide that.
    """
    generic = 0.5 if variant.text("access") == "generic" else 0.0
    steps = problem.time // max(1, problem.sequences)
    enough = steps >= tile * variant.number("warps") / 2
    return (-tile if enough else tile) + generic


def time_last_cost(variant: Variant, problem: LinearScanProblem) -> float:
    return walk_cost(variant, problem, time_last_tile(variant))


def time_last_launch(variant: Variant, problem: LinearScanProblem) -> Launch:
    rows = problem.scans
    return Launch((ceil_div(rows, variant.number("rows")), 1, 1), problem.scalars())


def channel_last_tile(variant: Variant) -> tuple[int, int]:
    """Channels and times of a tile."""
    lanes, vector = variant.number("lanes"), variant.number("vector")
    return lanes * vector, variant.number("warps") * (32 // lanes) * variant.number("steps")


def channel_last_cost(variant: Variant, problem: LinearScanProblem) -> float:
    return 0.5 if variant.text("access") == "generic" else 0.0


def channel_last_launch(variant: Variant, problem: LinearScanProblem) -> Launch:
    channels, times = channel_last_tile(variant)
    columns = problem.outer * problem.batch * ceil_div(problem.channels, channels)
    tiles = ceil_div(problem.time, times)
    compensated = 2 if ITEM_SIZE[problem.dtype] >= 4 else 1
    words_of_map = compensated * ITEM_SIZE[state_dtype(problem.dtype)] // 4
    words = min(tiles - 1, 2) * columns * channels * words_of_map
    return Launch((columns * tiles, 1, 1), problem.scalars(), 16 + 8 * words if tiles > 1 else 0)


# --- The design -------------------------------------------------------------------------------


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why the rows of a problem are not what the variant needs."""
    access, chunk = variant.text("access"), problem.chunk()
    if access != "generic" and problem.one_gate_a_row():
        return ONE_GATE
    if access == MISALIGNED:
        if not streams.fits_rows(variant, problem):
            return f"rows do not lie in chunks of {chunk} {problem.dtype} as it needs them"
        return None
    if access != "generic" and not problem.whole_chunks(chunk):
        return f"rows are not made of whole chunks of {chunk} {problem.dtype} in aligned memory"
    return None


def times(variant: Variant) -> int:
    """Time steps that a tile covers."""
    if variant.kernel.startswith("time_last"):
        return time_last_tile(variant)
    return channel_last_tile(variant)[1]


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    if problem.layout == "time_last":
        return time_last_cost(variant, problem)
    return channel_last_cost(variant, problem)


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    if problem.layout == "time_last":
        return time_last_launch(variant, problem)
    return channel_last_launch(variant, problem)


def sums(variant: Variant) -> bool:
    return False


def shared(direction: Direction, variant: Variant) -> int:
    return 0
