"""The rings in shared memory that tuning may choose from: tiles of CUDA variants with a number of ``stages``, whose
static parameters ``streams.py`` describes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from scan_registry.kernels.linear_scan import narrow
from scan_registry.kernels.linear_scan.problem import Direction
from scan_registry.kernels.linear_scan.space import (
    MISALIGNED,
    MULTI_CTA,
    NARROW,
    ONE_GATE,
    VARLEN,
    Tile,
)
from scan_registry.kernels.model import ITEM_SIZE

#: Bytes of shared memory that all CTAs of an SM may have together.
_SHARED = 220_000
#: Bytes of the ring of a CTA that has an SM to itself, which leaves a little for its static shared memory.
_ALONE = 231_424
#: Of scans that are cut into segments: bytes of the states that a CTA keeps, at most, and of the segments that it drew.
_KEPT, _DRAWN = 3072, 64 * 8 + 16 * 12
#: Bytes in which a warp keeps where packed sequences begin (``packed_tiles.cuh``).
_NEARBY = 33 * 8
#: Scans that are cut into segments. Contiguous time: numbers of warps that own tiles, pieces of a lane, and pairs of
#: stages and prefix lead. Few channels: pairs of stages and prefix lead, by the steps of a tile.
_CUT = (
    ((10, 12, 16), 2, ((4, 2), (5, 3))),
    ((8, 9, 10, 11, 12), 4, ((3, 2), (4, 2), (5, 3))),
    ((16, 18), 4, ((2, 1), (3, 2))),
    ((8, 10, 12, 16), 8, ((2, 1), (3, 2))),
)
_CUT_STEPS = {4: ((4, 2),), 6: ((3, 1), (3, 2), (4, 2)), 8: ((2, 1), (3, 1), (3, 2), (4, 2))}
#: Rows side by side: numbers of lanes that share a row, pieces of a lane, and triples of ``rows``, stages and the
#: most CTAs of an SM that are worth a try. The notes say which were left out.
_SIDE_BY_SIDE: tuple[tuple[tuple[int, ...], int, tuple[tuple[int, int, int], ...]], ...] = (
    ((2, 4, 8, 16, 32), 1, ((2, 3, 8), (4, 1, 8), (4, 2, 8), (4, 3, 6))),
    ((1, 2, 4, 8, 16, 32), 2, ((2, 2, 8), (2, 3, 8), (4, 1, 8), (4, 3, 4))),
    ((16,), 1, ((4, 1, 12),)),
    ((16,), 2, ((4, 1, 12),)),
    ((16, 32), 4, ((4, 1, 8), (4, 2, 4))),
    ((32,), 4, ((6, 2, 2), (6, 3, 2), (6, 4, 2))),
    ((1, 2), 8, ((4, 3, 4),)),
    ((16, 32), 8, ((2, 1, 12), (8, 1, 2), (8, 2, 1))),
)
#: Column-serial, 64 channels: warps, and steps and stages, beside the usual ones, by an element's bytes.
_BESIDE = {
    2: (
        *((4, (8, 7)), (4, (8, 8)), (4, (16, 4)), (4, (16, 6))),
        *((4, (18, 3)), (4, (20, 3)), (8, (16, 4))),
    ),
    4: ((4, (10, 2)),),
}
#: Column-serial, 128 channels: warps, steps and stages.
_WIDE = (
    *((4, 6, 4), (4, 8, 2), (4, 8, 3), (4, 8, 4), (4, 8, 5), (4, 12, 2), (4, 12, 3), (4, 12, 4)),
    *((4, 16, 2), (6, 8, 4), (8, 8, 2), (8, 8, 3)),
)
#: Column-serial, misaligned rows: warps, steps and stages, beside the usual ones; and for many channels of 16-bit elements by the
#: direction, with 128 channels to a column.
_MISALIGNED = ((4, 12, 2), (4, 12, 3))
_WIDE_MISALIGNED: dict[Direction, tuple[int, int, int]] = {
    "forward": (8, 6, 3),
    "backward": (8, 6, 2),
}
#: Column-serial, aligned rows: tiles without code for one gate of all steps, by dtype and direction: warps, lanes across, channels
#: of a lane, steps and stages. That code is as large as the other. By the tuning tables, scans with one gate take at most 1% longer
#: in the mean without it.
_EACH_GATE: dict[tuple[str, Direction], frozenset[tuple[int, int, int, int, int]]] = {
    ("bfloat16", "forward"): frozenset({(8, 32, 2, 16, 3)}),
    ("float16", "forward"): frozenset({(4, 32, 2, 16, 3)}),
    ("float32", "forward"): frozenset({(4, 32, 2, 16, 2), (8, 32, 1, 16, 3)}),
    ("bfloat16", "backward"): frozenset(
        {(4, 16, 1, 16, 5), (8, 32, 1, 8, 5), (8, 32, 1, 16, 3), (16, 32, 1, 16, 2)}
    ),
    ("float16", "backward"): frozenset({(8, 32, 1, 16, 3), (16, 32, 1, 8, 3)}),
    ("float32", "backward"): frozenset({(4, 32, 2, 10, 2)}),
}
#: Of several CTAs to a column: stages, and the aggregate lead.
_AGGREGATE_LEADS = ((4, 2), (6, 3))
#: Column-serial, packed sequences, by an element's bytes: warps, lanes across and channels of a lane, steps and stages. With few
#: sequences the longest takes longest, and the fewer channels a CTA has, the sooner it ends. With many, rows of 128 bytes are best.
_VARLEN = {
    2: ((8, (32, 2), 16, 4), (8, (16, 2), 16, 3), (8, (16, 2), 12, 2), (8, (8, 2), 16, 2)),
    4: ((8, (32, 1), 16, 3), (8, (32, 2), 16, 2)),
}
#: Single wave: warps, steps and stages of few columns that are read at once, of which a lane has four bytes; by an
#: element's bytes and the direction.
_SINGLE_WAVE: dict[tuple[int, Direction], tuple[tuple[int, int, int], ...]] = {
    (2, "forward"): ((8, 16, 6),),
    (2, "backward"): ((8, 8, 8),),
    (4, "forward"): ((16, 8, 6),),
    (4, "backward"): ((16, 8, 4),),
}


def time_last(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Whole rows, side by side in a warp, down to one row for each lane; or segments of rows. Rows that fit into one
    tile have nothing to prefetch, but gain from more CTAs on an SM."""
    for sharing, pieces, blocks in _SIDE_BY_SIDE:
        for lanes, (rows, stages, most) in product(sharing, blocks):
            if ITEM_SIZE[dtype] < 8 or lanes >= 16:
                tile = {"warps": 1, "rows": rows, "lanes": lanes, "pieces": pieces}
                yield from resident(direction, dtype, tile | {"stages": stages}, most)
    for tile_warps, pieces, rings in _CUT:
        for rows, (stages, lead) in product(tile_warps, rings):
            tile = {"warps": 1, "rows": rows, "lanes": 32, "pieces": pieces}
            yield from resident(direction, dtype, tile | {"stages": stages, "prefix_lead": lead}, 1)


def channel_last(direction: Direction, dtype: str, access: str) -> Iterator[Tile]:
    """Columns whose rows have 32 to 512 bytes. For few channels, columns with 16 bytes for each lane, which are cut
    into segments."""
    item = ITEM_SIZE[dtype]
    if access == VARLEN and item in _VARLEN:
        yield from _varlen_columns(direction, dtype)
        return
    yield from _serial_columns(direction, dtype, access)
    if access == MISALIGNED:
        yield from _misaligned_columns(direction, dtype)
    if access in (MISALIGNED, VARLEN):
        return
    if item < 8:
        for warps, steps, stages in _WIDE:
            yield from resident(direction, dtype, _column(warps, 4, steps, stages), 2)
    if item == 2:
        # One CTA to an SM, which then has more registers than two would have.
        yield from resident(direction, dtype, _column(4, 2, 12, 3), 1)
        yield from _multi_cta_columns(direction, dtype)
    yield from _single_wave_columns(direction, dtype)
    yield from _cut_columns(direction, dtype)


def _serial_columns(direction: Direction, dtype: str, access: str) -> Iterator[Tile]:
    """Columns that one CTA passes serially in time."""
    item = ITEM_SIZE[dtype]
    usual = ((4, 6), (8, 3), (8, 4), (8, 5), (16, 2), (16, 3))
    for warps, (lanes_across, vector), (steps, stages) in (
        *product((4, 8, 16), ((16, 1), (32, 1), (32, 2)) if item < 8 else ((16, 1),), usual),
        *((warps, (32, 2), ring) for warps, ring in _BESIDE.get(item, ())),
        # Narrow columns are for problems that have one CTA for each SM.
        *product((4,), ((16, 1),), ((16, 5), (32, 3)) if item < 8 else ()),
    ):
        narrow = lanes_across == 16 and item < 8
        if (warps == 16 and (steps == 4 or narrow)) or (warps == 8 and steps == 4 and narrow):
            continue  # at least 3% slower than another tile on every tuned problem
        tile = _column(warps, vector, steps, stages, lanes_across)
        yield from resident(direction, dtype, tile, 2, access)
        if warps == 16:  # more registers
            yield from resident(direction, dtype, tile, 1, access)


def _cut_columns(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Few channels, cut into segments that many CTAs share."""
    item = ITEM_SIZE[dtype]
    vector = 16 // item
    widths = [(8, 8, 4), (8, 8, 8), (8, 16, 4), (8, 16, 6), (8, 16, 8)]
    if item < 8:
        widths += [(4, 32, 8), (8, 32, 6), (8, 32, 8)]
    for warps, scans, steps in widths:
        for stages, lead in _CUT_STEPS[steps]:
            if warps == 4 and stages == lead + 1:
                continue  # at least 4% slower than another tile on every tuned problem
            tile = {"warps": warps, "lanes": scans // vector, "vector": vector, "steps": steps}
            yield from resident(direction, dtype, tile | {"stages": stages, "prefix_lead": lead}, 1)


def _column(warps: int, vector: int, steps: int, stages: int, lanes_across: int = 32) -> Tile:
    return {
        "warps": warps,
        "lanes_across": lanes_across,
        "vector": vector,
        "steps": steps,
        "stages": stages,
    }


def _misaligned_columns(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Misaligned rows, of which a lane has two channels, or four."""
    for warps, steps, stages in _MISALIGNED:
        yield from resident(direction, dtype, _column(warps, 2, steps, stages), 2, MISALIGNED)
    if ITEM_SIZE[dtype] == 2:
        warps, steps, stages = _WIDE_MISALIGNED[direction]
        yield from resident(direction, dtype, _column(warps, 4, steps, stages), 1, MISALIGNED)


def is_wide(tile: Tile) -> bool:
    """Whether a tile is of a column of 128 channels."""
    return "lanes_across" in tile and tile["vector"] == 4


def takes_one_gate(direction: Direction, dtype: str, access: str, tile: Tile) -> bool:
    """Whether a column-serial kernel takes channels that have one gate for all steps. None for misaligned rows
    does: it needs all tensors at one offset to 16 bytes, which one gate a channel seldom has. Nor do wide columns, since narrower
    ones are faster there."""
    if access in (MISALIGNED, MULTI_CTA) or is_wide(tile):
        return False
    statics = tuple(tile[name] for name in ("warps", "lanes_across", "vector", "steps", "stages"))
    return access != "aligned" or statics not in _EACH_GATE.get((dtype, direction), ())


def _varlen_columns(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Packed sequences, of any lengths."""
    for warps, (lanes_across, vector), steps, stages in _VARLEN[ITEM_SIZE[dtype]]:
        tile = _column(warps, vector, steps, stages, lanes_across)
        yield from resident(direction, dtype, tile, 1, VARLEN)


def _multi_cta_columns(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Columns that several CTAs share."""
    few = (5, _AGGREGATE_LEADS[direction == "forward"])
    for ctas, (stages, lead) in (*product((3, 4, 8), _AGGREGATE_LEADS), few):
        tile = {**_column(8, 2, 16, stages), "ctas_per_column": ctas, "aggregate_lead": lead}
        yield from resident(direction, dtype, tile, 1)


def _single_wave_columns(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Few columns that many CTAs read at once."""
    item = ITEM_SIZE[dtype]
    for warps, steps, stages in _SINGLE_WAVE.get((item, direction), ()):
        tile = {**_column(warps, 4 // item, steps, stages), "single_wave": 1}
        yield from resident(direction, dtype, tile, 1)


def resident(
    direction: Direction, dtype: str, tile: Tile, most: int, access: str = ""
) -> Iterator[Tile]:
    """The tile with the number of CTAs that an SM has room for, at most ``most``; of those
    that leave it neither idle nor crowded."""
    shared_bytes = shared(direction, dtype, access, tile) + _static_shared(dtype, tile)
    threads = 32 * warps(tile)
    blocks = min((_ALONE if most == 1 else _SHARED) // shared_bytes, 2048 // threads, most)
    if threads <= 1024 and blocks * threads >= 128 and blocks * shared_bytes >= 48_000:
        yield {**tile, "blocks": blocks}


def shared(direction: Direction, dtype: str, access: str, tile: Tile) -> int:
    """Bytes of a CTA's ring."""
    if access == NARROW:
        return narrow.ring_bytes(direction, tile)
    inputs = (2 if direction == "forward" else 3) - (access == ONE_GATE)
    ring = int(tile["stages"]) * int(tile["warps"])
    if "pieces" in tile:
        pieces = inputs * 32 * int(tile["pieces"])
        if direction == "backward":  # of the states one more a row
            pieces += max(8, 32 // int(tile["lanes"]))  # in whole rows of banks
        return 16 * ring * int(tile["rows"]) * pieces
    warp = 32 * int(tile["vector"]) * int(tile["steps"]) * ITEM_SIZE[dtype]
    if "lanes_across" in tile:
        groups = 32 // int(tile["lanes_across"])
        if access in (MISALIGNED, MULTI_CTA):  # one more piece a row
            warp += 16 * groups * int(tile["steps"])
        if ITEM_SIZE[dtype] < 8:  # between groups
            warp += 64 * (groups - 1)
    return ring * inputs * warp


def most_shared(direction: Direction, dtype: str, access: str, tile: Tile) -> int:
    """Bytes that a CTA takes of shared memory, at most, with what some drivers keep of it."""
    nearby = _NEARBY * tile_warps(tile) if access == VARLEN and "pieces" in tile else 0
    return shared(direction, dtype, access, tile) + _static_shared(dtype, tile) + nearby + 1024


def _static_shared(dtype: str, tile: Tile) -> int:
    """Static shared memory, at most, in bytes. Of segments: in each turn a map and a state for each scan of a tile warp,
    and for each scan of at most 64 columns a state with its error term. Of several CTAs to a column: for each channel the
    maps of all groups and of the tile, and in two turns a state for each. Of a single wave: for each channel a map and a
    state for each warp, and maps of slices of the parts before."""
    if "aggregate_lead" in tile:
        vector = int(tile["vector"])
        groups = 32 * int(tile["warps"]) * vector + int(tile["lanes_across"]) * vector
        return groups * ((int(tile["aggregate_lead"]) + 1) * 8 + 2 * 4)
    if "single_wave" in tile:
        across = 32 * int(tile["vector"]) + 2  # so that maps of one channel lie in different banks
        of_map = 8 if ITEM_SIZE[dtype] < 4 else 12
        return across * int(tile["warps"]) * (2 * of_map + 4)
    if "prefix_lead" not in tile:
        return 0
    turns, state = int(tile["prefix_lead"]) + 1, max(4, ITEM_SIZE[dtype])
    handed = turns * _side_by_side(tile) * 4 * tile_warps(tile) * state
    return handed + min(_KEPT, 64 * _side_by_side(tile) * 2 * state) + _DRAWN


def column_shared(dtype: str, access: str, tile: Tile) -> int:
    """Static shared memory of a CTA with a column of its own, in bytes: for each channel of a thread two maps and a sum. Where
    sequences are packed, also a length for each thread."""
    if "lanes_across" not in tile:
        return 0
    threads, state = 32 * int(tile["warps"]), max(4, ITEM_SIZE[dtype])
    of_channel = 2 * (8 if ITEM_SIZE[dtype] < 4 else 3 * state) + state
    lengths = 4 * threads + 16 if access == VARLEN else 0
    return threads * int(tile["vector"]) * of_channel + lengths


def tile_warps(tile: Tile) -> int:
    """Warps of a CTA that own tiles."""
    return int(tile["warps"]) * int(tile.get("rows", 1))


def _side_by_side(tile: Tile) -> int:
    """Scans of a warp, where columns are cut."""
    return 1 if "pieces" in tile else int(tile["lanes"]) * int(tile["vector"])


def warps(tile: Tile) -> int:
    """Of a CTA: those that own tiles, where columns are cut those that look back, and where CTAs share columns those that exchange
    aggregates."""
    own = tile_warps(tile)
    if "ctas_per_column" in tile:
        return own + int(tile["lanes_across"]) * int(tile["vector"]) // 32
    if "prefix_lead" not in tile:
        return own
    return own + (int(tile["prefix_lead"]) + 1) * max(1, _side_by_side(tile) * own // 32)
