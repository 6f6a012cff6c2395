"""The CUDA kernels of gated scan for contiguous time: variants, what each accepts, and how it launches.

Sources: ``time_last_forward.cu`` and ``time_last_backward.cu`` with their headers. Access ``aligned`` copies tiles through a
ring in shared memory (``../linear_scan/time_stream.cuh``). Access ``generic`` holds tiles in registers
(``../linear_scan/time_last.cuh``), and accepts any strides and packed sequences. The static parameters are the kind, which is
its header's name, and those of linear_scan's kernels (``streams.py``, ``registers.py``).

Tiles are chosen so that at least 40 KB are being copied on an SM at any time, and no registers are spilled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from scan_registry.hardware.target import Target
from scan_registry.kernels import model
from scan_registry.kernels.gated_scan import variants
from scan_registry.kernels.gated_scan.problem import (
    DIRECTIONS,
    HEADERS,
    Direction,
    GatedScanProblem,
    ceil_div,
)
from scan_registry.kernels.gated_scan.variants import FAMILY_NAME
from scan_registry.kernels.linear_scan import registers, rings, streams
from scan_registry.kernels.linear_scan.space import Tile

#: So many rows keep a GPU busy with a warp for each. Fewer rows, if they are long, are cut into segments.
MANY_ROWS = 1024
#: At most how many bytes of shared memory a CTA with look-back has beside its ring.
_LOOKBACK = 2048

#: Generic access has one tile for rows of any length.
_GENERIC: Tile = {"warps": 4, "rows": 1, "steps": 1}
#: Aligned access, whole rows: a warp has a row. A lane holds the maps of its elements in registers, or backward the kind's
#: ``Values``. There is room for few elements: in 16 bits 16 forward and 8 backward, in float32 8.
_WHOLE: dict[tuple[Direction, int], Tile] = {
    ("forward", 2): {"pieces": 2, "stages": 3},
    ("forward", 4): {"pieces": 2, "stages": 3},
    ("backward", 2): {"pieces": 1, "stages": 3},
    ("backward", 4): {"pieces": 2, "stages": 2},
}
#: Aligned access, rows that are cut into segments: each warp of a CTA has one tile. With so many warps a thread has 128
#: registers.
_CUT: dict[Direction, Tile] = {
    "forward": {"rows": 12, "stages": 6, "prefix_lead": 2, "blocks": 1},
    "backward": {"rows": 12, "stages": 4, "prefix_lead": 2, "blocks": 1},
}


#: Longer tiles for 16-bit elements. They need fewer instructions per element. Only kinds of two inputs have registers for
#: them.
_LONGER: dict[Direction, Tile] = {
    "forward": {"pieces": 4, "stages": 2, "blocks": 3},
    "backward": {"pieces": 2, "stages": 3, "blocks": 3},
}


def _whole(tile: Tile) -> Tile:
    return {"warps": 1, "rows": 4, "lanes": 32, **tile}


def _cut(direction: Direction) -> Tile:
    return {"warps": 1, "lanes": 32, "pieces": 1, **_CUT[direction]}


def _usual(direction: Direction, dtype: str) -> Tile:
    return _whole({**_WHOLE[direction, model.ITEM_SIZE[dtype]], "blocks": 4})


def _in_wheels(direction: Direction, dtype: str, kind: str, access: str) -> Iterator[Tile]:
    if access == "generic":
        yield _GENERIC
    elif dtype in variants.ALIGNED_IN_WHEELS:
        yield _usual(direction, dtype)


def _others(direction: Direction, dtype: str, kind: str, access: str) -> Iterator[Tile]:
    """More tiles that tuning may select: rows that are cut, longer tiles, and for float16 the tiles that wheels have for other
    dtypes."""
    if access == "generic":
        return
    if dtype not in variants.ALIGNED_IN_WHEELS:
        yield _usual(direction, dtype)
    yield _cut(direction)
    if model.ITEM_SIZE[dtype] == 2 and len(HEADERS[kind].inputs) == 2:
        yield _whole(_LONGER[direction])


# --- Shared memory ----------------------------------------------------------------------------


def copied(direction: Direction, variant: model.Variant) -> int:
    """Bytes of sequences in one stage of a warp's ring."""
    statics = dict(variant.statics)
    inputs = len(HEADERS[variant.text("kind")].inputs) + 2 * (direction == "backward")
    return 16 * 32 * int(statics["pieces"]) * inputs


def _shared(direction: Direction, variant: model.Variant) -> int:
    """Bytes of a CTA's ring. A stage has the pieces of the sequences, backward one more piece of the states, and the bytes of
    ``reset``. Forward, rows that are cut keep gates and tokens in float32 in the place of the inputs."""
    statics = dict(variant.statics)
    if "stages" not in statics:
        return 0
    size, pieces = model.ITEM_SIZE[variant.text("dtype")], variant.number("pieces")
    copies = copied(direction, variant) // 16
    if direction == "forward" and "prefix_lead" in statics:
        copies = max(copies, 32 * pieces * 2 * (4 // size))
    stage = copies + (direction == "backward") + 2 * pieces * 16 // size
    return 16 * variant.number("rows") * variant.number("stages") * ceil_div(stage, 8) * 8


def _serves(direction: Direction, statics: model.Pins, target: Target) -> bool:
    """Whether the GPUs of an architecture have enough shared memory for the variant."""
    if "stages" not in dict(statics):
        return True
    variant = model.Variant(FAMILY_NAME, f"time_last_{direction}", "cuda", statics)
    extra = _LOOKBACK if "prefix_lead" in dict(statics) else 0
    return _shared(direction, variant) + extra + variants.DRIVER_SHARED <= target.shared_memory


# --- Problems ---------------------------------------------------------------------------------


def _accepts(variant: model.Variant, problem: GatedScanProblem) -> str | None:
    if reason := variants.mismatch(variant, problem):
        return reason
    if variant.text("access") == "generic":
        return None
    chunk = problem.chunk()
    if not problem.whole_chunks(chunk):
        return f"rows are not made of whole chunks of {chunk} {problem.dtype} in aligned memory"
    return streams.refuses(variant, problem)


def _cost(variant: model.Variant, problem: GatedScanProblem) -> float:
    """The lowest is preferred: cut rows if rows are few and long, else whole rows."""
    if variant.text("access") == "generic":
        return 2.0
    few = problem.batch * problem.channels < MANY_ROWS
    long = problem.time > 2 * streams.times(variant)
    return float(("prefix_lead" in dict(variant.statics)) != (few and long))


def _launch(variant: model.Variant, problem: GatedScanProblem, sm_count: int) -> model.Launch:
    """Each row writes one part of the channel parameters' gradients, or each tile where rows are cut; ``parts`` says how many
    there are."""
    if not streams.is_streamed(variant):
        launch = registers.time_last_launch(variant, problem)
        return replace(launch, scalars=problem.scalars(parts=problem.batch))
    launch = streams.launch(variant, problem, sm_count)
    tiles = ceil_div(problem.time, streams.times(variant))
    cut = "prefix_lead" in dict(variant.statics)
    return replace(launch, scalars=problem.scalars(parts=problem.batch * (tiles if cut else 1)))


# --- Kernels ----------------------------------------------------------------------------------


def _kernel(direction: Direction) -> model.Kernel:
    name = f"time_last_{direction}"
    return model.Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        parameters=variants.parameters(direction),
        defaults=variants.space(partial(_in_wheels, direction)),
        code=model.Code(
            source=f"{name}.cu",
            entry=f"{FAMILY_NAME}_{name}",
            constants=variants.constants,
            warps=lambda variant: rings.warps(dict(variant.statics)),
            shared=partial(_shared, direction),
            headers=variants.headers(),
        ),
        rules=model.Rules(
            accepts=_accepts,
            kind_mismatch=variants.mismatch,
            serves=partial(_serves, direction),
            ships=variants.ships,
        ),
        cost=_cost,
        launch=_launch,
        tunable=model.Tunable(space=variants.space(partial(_others, direction))),
    )


def kernels() -> tuple[model.Kernel, ...]:
    return tuple(_kernel(direction) for direction in DIRECTIONS)
