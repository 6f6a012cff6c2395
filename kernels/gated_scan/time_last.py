"""The CUDA kernels of gated scan for contiguous time: variants, what each accepts, and how it launches.

Sources: ``time_last_forward.cu`` and ``time_last_backward.cu`` with their headers. Access ``aligned`` has its tiles in a
ring in shared memory, on ``../linear_scan/time_stream.cuh``; ``generic`` holds them in registers, on
``../linear_scan/time_last.cuh``, and takes everything. Static parameters are those of linear_scan's kernels
(``streams.py``, ``registers.py``), beside the kind, which is its header's name.

Tiles are chosen so that copies of at least 40 KB are under way on an SM, and no registers are spilled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from scan_registry.hardware.target import OLDEST, SHARED_MEMORY, Target
from scan_registry.kernels.gated_scan.problem import (
    DIRECTIONS,
    HEADERS,
    Direction,
    GatedScanProblem,
    ceil_div,
)
from scan_registry.kernels.gated_scan.variants import (
    FAMILY_NAME,
    constants,
    headers,
    mismatch,
    parameters,
    ships,
    space,
)
from scan_registry.kernels.linear_scan import registers, rings, streams
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.model import (
    ITEM_SIZE,
    Code,
    Kernel,
    Launch,
    Pins,
    Rules,
    Tunable,
    Variant,
)

#: Rows that keep a GPU busy, a warp to each; fewer are cut into segments.
MANY_ROWS = 1024
#: What drivers keep of a CTA's shared memory, and at most what a CTA that looks back has besides its ring.
_KEPT, _LOOKBACK = 1024, 2048

#: Of generic access: one tile for rows of any length.
_GENERIC: Tile = {"warps": 4, "rows": 1, "steps": 1}
#: Of aligned access: a row to a warp. A lane holds the maps of its elements in registers, or backward what the
#: derivatives need, and so of few elements: 16 forward and 8 backward in 16 bits, 8 in float32.
_WHOLE: dict[tuple[Direction, int], Tile] = {
    ("forward", 2): {"pieces": 2, "stages": 3},
    ("forward", 4): {"pieces": 2, "stages": 3},
    ("backward", 2): {"pieces": 1, "stages": 3},
    ("backward", 4): {"pieces": 2, "stages": 2},
}
#: Rows that are cut into segments, a tile to each of a CTA's warps: as many warps as have 128 registers for each thread.
_CUT: dict[Direction, Tile] = {
    "forward": {"rows": 12, "stages": 6, "prefix_lead": 2, "blocks": 1},
    "backward": {"rows": 12, "stages": 4, "prefix_lead": 2, "blocks": 1},
}


#: Dtypes that wheels have aligned tiles of. Others are served by generic access, until tuning names tiles of theirs.
_ALIGNED_IN_WHEELS = ("float32", "bfloat16")
#: Of 16-bit elements, longer tiles, for which fewer instructions are needed: kinds of two inputs have registers for them.
_LONGER: dict[Direction, Tile] = {
    "forward": {"pieces": 4, "stages": 2, "blocks": 3},
    "backward": {"pieces": 2, "stages": 3, "blocks": 3},
}


def _whole(tile: Tile) -> Tile:
    return {"warps": 1, "rows": 4, "lanes": 32, **tile}


def _cut(direction: Direction) -> Tile:
    return {"warps": 1, "lanes": 32, "pieces": 1, **_CUT[direction]}


def _usual(direction: Direction, dtype: str) -> Tile:
    return _whole({**_WHOLE[direction, ITEM_SIZE[dtype]], "blocks": 4})


def _in_wheels(direction: Direction, dtype: str, kind: str, access: str) -> Iterator[Tile]:
    if access == "generic":
        yield _GENERIC
    elif dtype in _ALIGNED_IN_WHEELS:
        yield _usual(direction, dtype)


def _others(direction: Direction, dtype: str, kind: str, access: str) -> Iterator[Tile]:
    """What tuning may choose from besides: rows that are cut, longer tiles, and what wheels have of other dtypes."""
    if access == "generic":
        return
    if dtype not in _ALIGNED_IN_WHEELS:
        yield _usual(direction, dtype)
    yield _cut(direction)
    if ITEM_SIZE[dtype] == 2 and len(HEADERS[kind].inputs) == 2:
        yield _whole(_LONGER[direction])


# --- Shared memory ----------------------------------------------------------------------------


def copied(direction: Direction, variant: Variant) -> int:
    """Bytes of sequences in one stage of a warp's ring."""
    statics = dict(variant.statics)
    inputs = len(HEADERS[variant.text("kind")].inputs) + 2 * (direction == "backward")
    return 16 * 32 * int(statics["pieces"]) * inputs


def _shared(direction: Direction, variant: Variant) -> int:
    """Bytes of a CTA's ring. In a stage, after the pieces of sequences come the bytes of ``reset``; backward one piece
    more of the states before them; and rows that are cut keep gates and tokens in float32 where the inputs were."""
    statics = dict(variant.statics)
    if "stages" not in statics:
        return 0
    size, pieces = ITEM_SIZE[variant.text("dtype")], variant.number("pieces")
    copies = copied(direction, variant) // 16
    if direction == "forward" and "prefix_lead" in statics:
        copies = max(copies, 32 * pieces * 2 * (4 // size))
    stage = copies + (direction == "backward") + 2 * pieces * 16 // size
    return 16 * variant.number("rows") * variant.number("stages") * ceil_div(stage, 8) * 8


def _serves(direction: Direction, statics: Pins, target: Target) -> bool:
    """Whether an architecture's GPUs have room for the variant's shared memory. PTX is held to those with the least."""
    if "stages" not in dict(statics):
        return True
    least = min(SHARED_MEMORY[each] for each in SHARED_MEMORY if each >= OLDEST)
    room = least if target.is_ptx else SHARED_MEMORY.get(target.capability, math.inf)
    variant = Variant(FAMILY_NAME, f"time_last_{direction}", "cuda", statics)
    extra = _LOOKBACK if "prefix_lead" in dict(statics) else 0
    return _shared(direction, variant) + extra + _KEPT <= room


# --- Problems ---------------------------------------------------------------------------------


def _accepts(variant: Variant, problem: GatedScanProblem) -> str | None:
    if reason := mismatch(variant, problem):
        return reason
    if variant.text("access") == "generic":
        return None
    chunk = problem.chunk()
    if not problem.whole_chunks(chunk):
        return f"rows are not made of whole chunks of {chunk} {problem.dtype} in aligned memory"
    return streams.refuses(variant, problem)


def _cost(variant: Variant, problem: GatedScanProblem) -> float:
    """Whole rows, unless they are few and long."""
    if variant.text("access") == "generic":
        return 2.0
    few = problem.batch * problem.channels < MANY_ROWS
    long = problem.time > 2 * streams.times(variant)
    return float(("prefix_lead" in dict(variant.statics)) != (few and long))


def _launch(variant: Variant, problem: GatedScanProblem, sm_count: int) -> Launch:
    """A part of the channel parameters' gradients is a row's, or a tile's where rows are cut."""
    if not streams.is_streamed(variant):
        launch = registers.time_last_launch(variant, problem)
        return replace(launch, scalars=problem.scalars(parts=problem.batch))
    launch = streams.launch(variant, problem, sm_count)
    tiles = ceil_div(problem.time, streams.times(variant))
    cut = "prefix_lead" in dict(variant.statics)
    return replace(launch, scalars=problem.scalars(parts=problem.batch * (tiles if cut else 1)))


# --- Kernels ----------------------------------------------------------------------------------


def _kernel(direction: Direction) -> Kernel:
    name = f"time_last_{direction}"
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        parameters=parameters(direction),
        defaults=space(partial(_in_wheels, direction)),
        code=Code(
            source=f"{name}.cu",
            entry=f"{FAMILY_NAME}_{name}",
            constants=constants,
            warps=lambda variant: rings.warps(dict(variant.statics)),
            shared=partial(_shared, direction),
            headers=headers(),
        ),
        rules=Rules(
            accepts=_accepts,
            kind_mismatch=mismatch,
            serves=partial(_serves, direction),
            ships=ships,
        ),
        cost=_cost,
        launch=_launch,
        tunable=Tunable(space=space(partial(_others, direction))),
    )


def kernels() -> tuple[Kernel, ...]:
    return tuple(_kernel(direction) for direction in DIRECTIONS)
