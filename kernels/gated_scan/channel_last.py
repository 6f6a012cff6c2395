"""The CUDA kernels of gated scan for contiguous channels: variants, what each accepts, and how it launches.

Sources: ``channel_last_forward.cu`` and ``channel_last_backward.cu`` with ``channel_last.cuh``. With access ``aligned``, a CTA
passes serially in time over a column of channels, whose tiles come through a ring in shared memory. Access ``generic`` holds
tiles in registers, and accepts any strides and packed sequences. The static parameters are the kind and those of linear_scan's
kernels (``streams.py``, ``registers.py``). ``notes/README.md`` says why the tiles are what they are.
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

#: From how many columns of 32 channels on wide columns are faster than narrow ones, by direction and bytes of an element.
MANY_COLUMNS: dict[tuple[Direction, int], int] = {
    ("forward", 2): 192,
    ("forward", 4): 100,
    ("backward", 2): 67,
    ("backward", 4): 67,
}
#: The most time steps that the kernels count in 32 bits.
_MOST_STEPS = 2**31 - 2**16


def _tensors(direction: Direction, kind: str) -> int:
    """How many tensors come through the ring: the inputs, and backward the states and their gradients, too."""
    return len(HEADERS[kind].inputs) + 2 * (direction == "backward")


def _in_wheels(direction: Direction, dtype: str, kind: str, access: str) -> Iterator[Tile]:
    """Wheels have generic access, and two aligned tiles: one for many columns and one for few."""
    if access == "generic":
        yield registers.WIDE
    elif dtype in variants.ALIGNED_IN_WHEELS:
        yield from _whole(direction, dtype, kind)


def _others(direction: Direction, dtype: str, kind: str, access: str) -> Iterator[Tile]:
    """More tiles that tuning may select: columns of 64 channels, columns that several CTAs share, and for float16 the tiles
    that wheels have for other dtypes."""
    if access == "generic":
        return
    if dtype not in variants.ALIGNED_IN_WHEELS:
        yield from _whole(direction, dtype, kind)
    steps = 4 if direction == "backward" else 8
    yield {"warps": 4, "lanes_across": 32, "vector": 2, "steps": steps, "stages": 3, "blocks": 2}
    if dtype != "float32":
        yield _shared_column(_tensors(direction, kind))


def _whole(direction: Direction, dtype: str, kind: str) -> Iterator[Tile]:
    """Tiles of columns that one CTA scans: wide columns, and narrow ones for when wide ones are too few for the GPU."""
    size, tensors = model.ITEM_SIZE[dtype], _tensors(direction, kind)
    wide = {"warps": 8, "lanes_across": 32, "vector": 1, "steps": 8, "stages": 3}
    if direction == "backward":
        yield {**wide, "blocks": 1}
    elif size == 2:
        yield {**wide, "blocks": 2}
    else:
        yield {**wide, "warps": 4, "blocks": 5}
    narrow = {"warps": 8, "lanes_across": 16, "vector": 1}
    if direction == "forward":
        yield {**narrow, "steps": 16, "stages": 3, "blocks": 1}
    elif size == 2:
        yield {**narrow, "steps": 12, "stages": 3, "blocks": 1}
    elif tensors > 4:
        yield {**narrow, "steps": 12, "stages": 2, "blocks": 1}
    else:
        yield {**narrow, "steps": 8, "stages": 3, "blocks": 1}


def _shared_column(tensors: int) -> Tile:
    """A tile of columns that four CTAs share. A CTA keeps the maps of ``aggregate_lead`` + 1 tiles. Its ring holds as many
    tiles, and those that are being copied."""
    stages, lead = {2: (6, 3), 3: (4, 2), 4: (6, 3), 5: (5, 2)}.get(tensors, (4, 2))
    tile = {"warps": 8, "lanes_across": 32, "vector": 2, "steps": 16 if tensors < 4 else 8}
    return {**tile, "stages": stages, "ctas_per_column": 4, "aggregate_lead": lead, "blocks": 1}


# --- Shared memory ----------------------------------------------------------------------------


def _warp_bytes(dtype: str, tile: Tile) -> int:
    """Bytes of one tensor's rows that a warp copies, with the padding between its groups (``column_serial.cuh``)."""
    groups = 32 // int(tile["lanes_across"])
    return 32 * int(tile["vector"]) * int(tile["steps"]) * model.ITEM_SIZE[dtype] + 64 * (
        groups - 1
    )


def _shared(direction: Direction, variant: model.Variant) -> int:
    """Bytes of a CTA's ring."""
    tile = dict(variant.statics)
    if "stages" not in tile:
        return 0
    stage = int(tile["warps"]) * _warp_bytes(variant.text("dtype"), tile)
    return int(tile["stages"]) * stage * _tensors(direction, variant.text("kind"))


def _static_shared(variant: model.Variant) -> int:
    """At most how many bytes a CTA has beside its ring. If it has a column for itself: two maps and a sum for each channel of
    a thread. If several CTAs share a column: the maps of ``aggregate_lead`` + 1 tiles and of the whole tile, the states that
    enter two tiles, and a sum."""
    tile, vector = dict(variant.statics), variant.number("vector")
    channels = 32 * variant.number("warps") * vector
    map_bytes = 8 if model.ITEM_SIZE[variant.text("dtype")] < 4 else 12
    if "aggregate_lead" not in tile:
        return channels * (2 * map_bytes + 4)
    groups = channels + variant.number("lanes_across") * vector
    return groups * ((int(tile["aggregate_lead"]) + 1) * map_bytes + 2 * 4) + 4 * channels


def _serves(direction: Direction, statics: model.Pins, target: Target) -> bool:
    """Whether the GPUs of an architecture have enough shared memory for the variant."""
    if "stages" not in dict(statics):
        return True
    variant = model.Variant(FAMILY_NAME, f"channel_last_{direction}", "cuda", statics)
    used = _shared(direction, variant) + _static_shared(variant) + variants.DRIVER_SHARED
    return used <= target.shared_memory


# --- Problems ---------------------------------------------------------------------------------


def _accepts(variant: model.Variant, problem: GatedScanProblem) -> str | None:
    if reason := variants.mismatch(variant, problem):
        return reason
    if problem.time > _MOST_STEPS:
        return f"{problem.time} steps; it counts {_MOST_STEPS}"
    if variant.text("access") == "generic":
        return None
    chunk = problem.chunk()
    if not problem.whole_chunks(chunk):
        return f"rows are not made of whole chunks of {chunk} {problem.dtype} in aligned memory"
    ctas = int(dict(variant.statics).get("ctas_per_column", 1))
    if problem.time <= (ctas - 1) * streams.times(variant):
        return f"fewer tiles than the {ctas} blocks that share a column"
    return streams.refuses(variant, problem)


def _cost(variant: model.Variant, problem: GatedScanProblem) -> float:
    """The order of preference, the lowest first: wide columns if there are many. If there are few: shared columns, where the
    GPU has room for all their CTAs at once, then narrow columns."""
    if variant.text("access") == "generic":
        return 3.0
    tile = dict(variant.statics)
    direction: Direction = "forward" if problem.direction == "forward" else "backward"
    many = MANY_COLUMNS[direction, model.ITEM_SIZE[problem.dtype]]
    order = ("wide", "narrow", "shared")
    if problem.batch * ceil_div(problem.channels, 32) < many:
        order = ("shared", "narrow", "wide")
    narrow = "narrow" if tile["lanes_across"] == 16 else "wide"
    return float(order.index("shared" if "ctas_per_column" in tile else narrow))


def _launch(variant: model.Variant, problem: GatedScanProblem, sm_count: int) -> model.Launch:
    """Each CTA of a column writes one part of the channel parameters' gradients; ``parts`` says how many there are."""
    if not streams.is_streamed(variant):
        launch = registers.channel_last_launch(variant, problem)
        parts = ceil_div(problem.time, registers.channel_last_tile(variant)[1])
    else:
        launch = streams.launch(variant, problem, sm_count)
        parts = int(dict(variant.statics).get("ctas_per_column", 1))
    return replace(launch, scalars=problem.scalars(parts=problem.batch * parts))


# --- Kernels ----------------------------------------------------------------------------------


def _constants(variant: model.Variant) -> dict[str, model.Static]:
    return {
        "CTAS_PER_COLUMN": 1,
        "SINGLE_WAVE": 0,
        "COLUMN_SERIAL": int(streams.is_column_serial(variant)),
        **variants.constants(variant),
    }


def _kernel(direction: Direction) -> model.Kernel:
    name = f"channel_last_{direction}"
    return model.Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        parameters=variants.parameters(direction),
        defaults=variants.space(partial(_in_wheels, direction)),
        code=model.Code(
            source=f"{name}.cu",
            entry=f"{FAMILY_NAME}_{name}",
            constants=_constants,
            warps=lambda variant: rings.warps(dict(variant.statics)),
            shared=partial(_shared, direction),
            headers=variants.headers(),
        ),
        rules=model.Rules(
            accepts=_accepts,
            kind_mismatch=variants.mismatch,
            exceeds_residency=streams.exceeds_residency,
            serves=partial(_serves, direction),
            ships=variants.ships,
        ),
        cost=_cost,
        launch=_launch,
        tunable=model.Tunable(space=variants.space(partial(_others, direction))),
    )


def kernels() -> tuple[model.Kernel, ...]:
    return tuple(_kernel(direction) for direction in DIRECTIONS)
