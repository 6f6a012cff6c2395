"""How long a variant takes on a problem that nobody has timed: an estimate with few coefficients for each design.

A design is a way of working that variants have in common, such as ``columns``: see ``streams.py``. A call takes a fixed
time, and then as long as the slowest of three things that overlap:

- DRAM moves the bytes. Where rows of tiles begin or end within sectors of memory, which they then share with other tiles,
  that takes longer.
- The busiest SM copies the rows of its tiles, computes their elements, and for each thread and tile an exchange with other
  threads.
- The CTA that is done last waits for its tiles, one after the other: for memory, by the depth of its ring, and for what
  a tile computes. Where channels are contiguous and access is generic, each tile of a column waits for the one before.

Nothing is estimated for what is timed too seldom for a fit: wide dtypes, and sequences packed along time.

``tools/timing_model.py`` fits the coefficients to the tuning tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from scan_registry.kernels.linear_scan import rings, streams
from scan_registry.kernels.linear_scan.problem import ceil_div
from scan_registry.kernels.linear_scan.registers import channel_last_tile, time_last_tile
from scan_registry.kernels.linear_scan.space import MISALIGNED, ONE_GATE
from scan_registry.kernels.model import ITEM_SIZE, Variant
from scan_registry.kernels.tuning import Shape

#: Of variants that there is a model for.
_ACCESSES = "generic", "aligned", MISALIGNED, ONE_GATE
#: Bytes side by side of a tile, beyond which more of them gain nothing.
_WIDE = 256
#: Threads of an SM that has as many CTAs as it has room for, where a variant keeps its tiles in registers.
_RESIDENT = 1024
#: How sharply the slowest of what overlaps decides.
_SHARPNESS = 4
#: Bytes of memory that are read and written together.
_SECTOR = 32

#: ps for an element of contiguous channels, at least, where a gate is shared by all time steps: such designs read it again
#: for each. Timed on an H200, with (27, 144, 37132), (5, 72, 439474) and (3, 376, 15249) among the shapes; columns that one
#: CTA passes over, and segments, lose nothing.
_SHARED_GATES: Mapping[str, float] = {"single_wave": 10.0, "multi_cta_columns": 4.3}
#: What generic access takes of its estimate with 16-bit elements of contiguous time, where another access serves. Timed on an H200, with
#: (8, 91, 3530) and (1391, 1, 3375), and weighted little in the fit, since it is mostly far slower there.
_GENERIC_HALVES = 1.1
#: What tiles without gates take of the time of segments with them. Timed on an H200: 0.78 to 0.94, forward and backward.
_WITHOUT_GATES = 0.9
#: ms of a turn of rows that share a gate, at least, where a CTA has one stage, so that nothing is copied while it computes. Timed on
#: an H200, with (8, 8, 5416).
_TURN_ALONE = 1.3e-3
#: A coefficient for each of these, in ms but for those that say otherwise.
COEFFICIENTS = (
    "call",
    "dram",  # a factor
    "split",  # a factor
    "element",
    "wide_element",
    "thread",
    "row",
    "memory",
    "tile",
    "held",
    "tail",  # a factor: of a last wave that is not full, how much of what is missing it takes all the same
)


class Geometry(NamedTuple):
    """What is the same on all problems.

    tensors  read and written
    item     bytes of an element
    across   scans side by side in a CTA, or in a tile of it where scans are cut
    times    that a tile covers; where scans are cut, that a segment does
    held     elements of a thread
    depth    tiles on their way
    row      elements of a tile side by side in memory
    shared   CTAs that share a column
    alone    whether a CTA's ring has one stage
    """

    design: str
    tensors: int
    time_last: bool
    misaligned: bool
    item: int
    across: int
    times: int
    held: int
    depth: int
    blocks: int
    row: int
    shared: int
    alone: bool


class Work(NamedTuple):
    """What a variant has to do on a problem: numbers, or arrays of them.

    dram      bytes to and from it over its bandwidth, in ms
    split     bytes of sectors that rows of tiles share with other tiles, over their own
    elements  of the busiest SM; ``wide`` times more of wider dtypes, less one
    threads   of its tiles
    rows      of its tiles; pieces of a wide row's bytes where they follow one another
    turns     tiles that the last CTA has one after the other
    missing   what the last wave has less than a whole one
    depth     of the ring
    held      elements of a thread
    """

    dram: float
    split: float
    elements: float
    wide: float
    threads: float
    rows: float
    turns: float
    missing: float
    depth: float
    held: float


def milliseconds(work: Work, of: Mapping[str, float]) -> float:
    """By the coefficients of its design. Arithmetic alone, so that it takes arrays, too."""
    dram = work.dram * of["dram"] * (1 + of["split"] * work.split)
    of_element = of["element"] + of["wide_element"] * work.wide
    busiest = work.elements * of_element + work.threads * of["thread"] + work.rows * of["row"]
    turn = of["memory"] / work.depth + of["tile"] + of["held"] * work.held
    last = (work.turns + of["tail"] * work.missing) * turn
    slowest = dram**_SHARPNESS + busiest**_SHARPNESS + last**_SHARPNESS
    total: float = of["call"] + slowest ** (1 / _SHARPNESS)
    return total


def predicted(
    model: Mapping[str, Mapping[str, float]], text: str, shape: Shape, sm_count: int
) -> float | None:
    """Milliseconds of the variant that prints as ``text`` on a problem there; None if the model says nothing of such
    a variant, or it is not for such problems, or there can be none.

    model  coefficients by design; of ``gpu`` the ``bandwidth`` in bytes per ms
    """
    try:
        shape_of_variant = geometry(text) if _serves(text, shape) else None
        if shape_of_variant is None or shape_of_variant.design not in model:
            return None
        work = work_of(shape_of_variant, shape.sizes, sm_count, model["gpu"]["bandwidth"])
        ms = milliseconds(work, model[shape_of_variant.design])
        if f"access={ONE_GATE}," in text:
            ms *= _WITHOUT_GATES
        generic = shape_of_variant.design == "generic" and not shape.kind.endswith("generic")
        if generic and shape_of_variant.time_last and shape_of_variant.item == 2:
            ms *= _GENERIC_HALVES
        return max(ms, _least_with_shared_gates(shape_of_variant, shape.sizes, work))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None  # another version's, which is refused when it is looked at


def _least_with_shared_gates(of: Geometry, sizes: Mapping[str, float], work: Work) -> float:
    """Milliseconds below which a variant does not get if gates are broadcast; 0 if nothing is known."""
    if sizes["broadcast"] == 1:
        return 0.0
    if of.time_last:
        return work.turns * _TURN_ALONE if of.alone else 0.0
    return sizes["lines"] * sizes["time"] * _SHARED_GATES.get(of.design, 0.0) * 1e-9


def _serves(text: str, shape: Shape) -> bool:
    """Whether the variant is for problems of that kind, or for all of its dtypes."""
    statics, dtypes = text.rpartition(":")[2], shape.kind.partition("access=")[0]
    there = [f"{shape.kind},", f"{dtypes}access=generic,"]
    if shape.sizes["broadcast"] != 1 and shape.kind == f"{dtypes}access=aligned":
        there.append(f"{dtypes}access={ONE_GATE},")
    return shape.sizes["sequences"] == 1 and statics.startswith(tuple(there))


@lru_cache(maxsize=4096)
def geometry(text: str) -> Geometry | None:
    """Of the variant that prints as ``text``; None if no model is fitted for such. ``ValueError`` or ``LookupError``
    if there can be none."""
    variant = Variant.parse(text)
    dtype, access = variant.text("dtype"), variant.text("access")
    item = ITEM_SIZE[dtype]
    if item == 8 or access not in _ACCESSES or variant.language != "cuda":
        return None
    tile = {name: value for name, value in variant.statics if isinstance(value, int)}
    time_last = variant.kernel.startswith("time_last")
    warps = rings.tile_warps(tile)
    if not streams.is_streamed(variant):
        design, depth = "generic" if access == "generic" else "registers", 1
        blocks = max(1, _RESIDENT // (32 * warps))
        if time_last:
            times, across = time_last_tile(variant), tile["rows"]
            per_thread = tile["steps"] * 16 // item
        else:
            (across, times), per_thread = channel_last_tile(variant), tile["vector"] * tile["steps"]
        row = _WIDE if time_last else across
    else:
        times, across = streams.times(variant), streams.scans(variant)
        depth, blocks = max(1, tile["stages"] - 1), tile["blocks"]
        per_thread = tile["pieces"] * 16 // item if time_last else tile["vector"] * tile["steps"]
        row = tile["lanes"] * per_thread if time_last else across
        design = _design(tile, time_last)
        if design == "segments":
            times *= warps
            across = 1 if time_last else across
    tensors, shared = 3 if variant.kernel.endswith("forward") else 5, tile.get("ctas_per_column", 1)
    if time_last and access == MISALIGNED and design != "segments":
        design = f"misaligned_{design}"  # copies of such rows take longer
    kind = design, tensors, time_last, access == MISALIGNED, item
    alone = tile.get("stages") == 1
    return Geometry(*kind, across, times, per_thread, depth, blocks, row, shared, alone)


def _design(tile: Mapping[str, int], time_last: bool) -> str:
    if "prefix_lead" in tile:
        return "segments"
    if time_last:
        return "rows"
    if "single_wave" in tile:
        return "single_wave"
    return "multi_cta_columns" if "ctas_per_column" in tile else "columns"


def work_of(of: Geometry, sizes: Mapping[str, float], sm_count: int, bandwidth: float) -> Work:
    """What a variant has to do on a problem of those sizes."""
    scans, time = int(sizes["lines"]), int(sizes["time"])
    channels = scans if of.time_last else int(sizes["channels"])
    tensors = of.tensors - (sizes["broadcast"] != 1)
    moved = tensors * scans * time * of.item
    walked = time + (_skipped(of, time) if of.misaligned else 0)
    columns = scans // channels * ceil_div(channels, of.across)
    tiles, slots = ceil_div(walked, of.times), sm_count * of.blocks
    chained = of.design == "generic" and not of.time_last
    if of.design == "segments" or chained:
        ctas, turns = columns * tiles, 1
    elif of.design == "single_wave":
        turns = ceil_div(tiles, max(1, min((slots - 1) // columns, tiles)))
        ctas = columns * ceil_div(tiles, turns)
    else:
        ctas, turns = columns * of.shared, ceil_div(tiles, of.shared)
    elements = ceil_div(ctas, sm_count) * turns * of.across * of.times
    waves, missing = max(1.0, ctas / slots), math.ceil(ctas / slots) - ctas / slots
    if chained:
        waves, missing = tiles, 0
    pitch, row, split = (time if of.time_last else channels) * of.item, of.row * of.item, 0
    if row < pitch:
        split = _SECTOR - math.gcd(pitch, row, _SECTOR)
    else:  # rows of a tile follow one another
        row = _WIDE
    return Work(
        dram=moved / bandwidth,
        split=split / row,
        elements=elements,
        wide=of.item / 2 - 1,
        threads=elements / of.held,
        rows=elements * of.item / row,
        turns=waves * turns,
        missing=missing * turns if ctas > slots else 0,
        depth=of.depth,
        held=of.held,
    )


def _skipped(of: Geometry, time: int) -> int:
    """Elements before a misaligned row where its scan may start."""
    line = streams.LINE // of.item
    return line - 1 if time >= 16 * line else 16 // of.item - 1
