"""The kernels that summarize a scan by its affine map: the product of its gates, and the final state from a state of zero.

A launch cuts time so that the CTAs fill the GPU. All of a row's warps, or a column's slots, are one CTA's, unless there
are too few rows or columns for that; then each is cut into segments, and their maps meet in a workspace. The sources are
``time_last_summary.cu`` and ``channel_last_summary.cu``, with ``summary.cuh``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil

from scan_registry.kernels.linear_scan.problem import (
    ONE_GATE,
    Layout,
    LinearScanProblem,
    ceil_div,
    state_dtype,
)
from scan_registry.kernels.linear_scan.space import FAMILY_NAME, Tile, scans
from scan_registry.kernels.model import (
    ITEM_SIZE,
    Code,
    Kernel,
    Launch,
    Parameter,
    Rules,
    Static,
    Variant,
)

WARPS = 8
#: CTAs for each SM: rows have as many warps each as it takes for the first number, and are cut into segments for the
#: second.
_WARPS_FOR, _SEGMENTS_FOR = 16, 32
#: CTAs that an SM has registers for, at least.
_LEAST_CTAS: dict[Layout, int] = {"time_last": 3, "channel_last": 2}
#: Over contiguous channels: the part of the SMs that is to have as many CTAs as any other, and CTAs at most for an SM.
_EVEN, _MOST_CTAS = 0.9, 8
#: Lanes across the channels at least, where there are as many channels.
_NARROWEST = 16
_MOST_LINES = 2**31 - 1


def _tiles(layout: Layout, dtype: str, access: str) -> tuple[Tile, ...]:
    """Chunks of a tensor that a lane has in hand, or rows of its channels. Wide dtypes gain nothing from reading 16
    bytes at once."""
    if access == "aligned" and ITEM_SIZE[dtype] == 8:
        return ()
    if layout == "time_last":
        return ({"warps": WARPS, "steps": 4 if access == "aligned" else 2},)
    return ({"warps": WARPS, "rows": 8},)


def _chunk(variant: Variant) -> int:
    """Elements that a lane reads at once."""
    item = ITEM_SIZE[variant.text("dtype")]
    if variant.text("access") == "aligned":
        return 16 // item
    if variant.kernel.startswith("channel_last"):
        return 1
    return min(4, 16 // item)


def _power(most: int) -> int:
    """The largest power of two that is at most this."""
    return 1 << most.bit_length() - 1


def _accepts(
    rejects: Callable[[Variant, LinearScanProblem], str | None],
    variant: Variant,
    problem: LinearScanProblem,
) -> str | None:
    if reason := rejects(variant, problem):
        return reason
    if problem.scans > _MOST_LINES:
        return f"it counts lines up to {_MOST_LINES}"
    if variant.text("access") != "aligned":
        return None
    if problem.one_gate_a_row():
        return ONE_GATE
    if problem.layout == "time_last":
        fits = problem.congruent()
    else:
        fits = problem.whole_chunks(_chunk(variant))
    return None if fits else "rows do not lie in 16-byte chunks as it needs them"


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """Its grid, and how time is cut."""
    if problem.layout == "time_last":
        return _launch_rows(variant, problem, sm_count)
    return _launch_columns(variant, problem, sm_count)


def _launch_rows(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    rows = problem.scans
    chunk = _chunk(variant)
    step = 32 * chunk * variant.number("steps")
    aligned = variant.text("access") == "aligned"
    # A chunk is the 16 bytes that a lane loads. A row need not start where a chunk does, and then spans more of them.
    length = problem.time + (chunk - 1 if aligned and not problem.whole_chunks(chunk) else 0)
    tiles = ceil_div(length, step)
    shares = min(WARPS, _power(tiles), _power(max(1, WARPS * _WARPS_FOR * sm_count // rows)))
    segments = 1
    if shares == WARPS:
        segments = max(1, min(ceil_div(_SEGMENTS_FOR * sm_count, rows), tiles // WARPS))
    share = ceil_div(tiles, segments * shares) * step
    cut = {"share": share, "shares": shares, "segments": ceil_div(length, share * shares)}
    return _cut(problem, ceil_div(rows * shares, WARPS), cut, rows)


def _launch_columns(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    chunk, batches = _chunk(variant), problem.outer * problem.batch
    needed = ceil_div(problem.channels, chunk)
    across = min(32, 2 * _power(needed - 1) if needed > 1 else 1)
    while across > _NARROWEST and batches * ceil_div(needed, across) < sm_count:
        across //= 2
    columns, shares = batches * ceil_div(needed, across), 32 * WARPS // across
    rows = variant.number("rows")
    most = ceil_div(problem.time, shares * rows)
    segments = _segments(columns / sm_count, most)
    share = ceil_div(problem.time, segments * shares * rows) * rows
    cut = {"share": share, "shares": shares, "segments": ceil_div(problem.time, share * shares)}
    return _cut(problem, columns, cut, columns, across * chunk)


def _segments(per_sm: float, most: int) -> int:
    """The fewest that give almost every SM as many CTAs, or those that come closest to it. ``each`` is how many CTAs of a
    segment there are for an SM."""

    def even(segments: int) -> float:
        return segments * per_sm / ceil(segments * per_sm)

    fewest = min(most, max(1, int(_EVEN / per_sm)))
    candidates = range(fewest, min(most, max(fewest, int(_MOST_CTAS / per_sm))) + 1)
    first = next((segments for segments in candidates if even(segments) >= _EVEN), None)
    return max(candidates, key=even) if first is None else first


def _cut(
    problem: LinearScanProblem, ctas: int, cut: dict[str, int], groups: int, width: int = 1
) -> Launch:
    """``ctas`` for each segment; ``groups`` of ``width`` lines have maps in the workspace, if there are several."""
    segments = cut["segments"]
    parts = 3 if ITEM_SIZE[problem.dtype] >= 4 else 2  # with the error term of the product
    of_map = parts * ITEM_SIZE[state_dtype(problem.dtype)]
    workspace = ceil_div(4 * groups, 16) * 16 + groups * segments * width * of_map
    return Launch(
        (ctas * segments, 1, 1), problem.scalars() | cut, workspace if segments > 1 else 0
    )


def summaries(
    parameters: tuple[Parameter, ...],
    constants: Callable[[Variant], Mapping[str, Static]],
    rejects: Callable[[Variant, LinearScanProblem], str | None],
) -> tuple[Kernel, ...]:
    """The kernels of both layouts. ``rejects`` says what is for problems of another kind."""
    return tuple(_kernel(layout, parameters, constants, rejects) for layout in _LEAST_CTAS)


def _kernel(
    layout: Layout,
    parameters: tuple[Parameter, ...],
    constants: Callable[[Variant], Mapping[str, Static]],
    rejects: Callable[[Variant, LinearScanProblem], str | None],
) -> Kernel:
    name = f"{layout}_summary"
    # A gate of zero forgets nothing that is not finite, as in the recurrence.
    own = {"MAY_RESET": 0, "LEAST_CTAS": _LEAST_CTAS[layout]}
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        parameters=parameters,
        defaults=scans(partial(_tiles, layout)),
        code=Code(
            source=f"{name}.cu",
            entry=f"{FAMILY_NAME}_{name}",
            constants=lambda variant: {**constants(variant), **own},
        ),
        rules=Rules(partial(_accepts, rejects), rejects),
        cost=lambda variant, problem: float(variant.text("access") == "generic"),
        launch=launch,
    )
