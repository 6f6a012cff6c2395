"""The tiles of the CUDA kernels: those that every wheel holds, and those that tuning may choose from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan import (
    constant_gate,
    multi_cta,
    narrow,
    one_gate,
    registers,
    resident,
    rings,
    scalar,
    short_rows,
    space,
)
from scan_registry.kernels.linear_scan.problem import Direction, Layout
from scan_registry.kernels.linear_scan.space import (
    CONSTANT_GATE,
    MISALIGNED,
    MULTI_CTA,
    NARROW,
    ONE_GATE,
    RESIDENT,
    SCALAR,
    SHORT,
    VARLEN,
    Tile,
)
from scan_registry.kernels.model import ITEM_SIZE, Pins

#: The capability of the GPU on which kernels were timed.
_TIMED = (9, 0)
#: Accesses of which there is one tile for a dtype and a direction, or none.
_OF_ACCESS = {
    MULTI_CTA: multi_cta.tiles,
    NARROW: narrow.tiles,
    CONSTANT_GATE: constant_gate.tiles,
    ONE_GATE: one_gate.tiles,
    RESIDENT: resident.tiles,
    SCALAR: scalar.tiles,
    SHORT: short_rows.tiles,
}


def usual(layout: Layout, direction: Direction, dtype: str, access: str) -> Sequence[Tile]:
    """The tiles that every wheel holds."""
    if access in _OF_ACCESS:
        return list(_OF_ACCESS[access](direction, dtype))
    if layout == "time_last":
        return _rows(direction, dtype, access)
    if access == "generic":
        return mixed(layout)
    return list(_column_and_cut(direction, dtype, access))


def _rows(direction: Direction, dtype: str, access: str) -> Sequence[Tile]:
    """Of contiguous time."""
    if access == VARLEN:
        return list(packed_rows(direction, dtype))
    if access == MISALIGNED:
        return [*_misaligned_rows(direction, dtype), *_cut_rows(direction, dtype)]
    short, long = registers.time_last_tiles()
    if access == "generic":
        return mixed("time_last") if ITEM_SIZE[dtype] == 8 else (short, long)
    # In dtypes of 8 bytes, generic variants take short rows.
    return (long,) if ITEM_SIZE[dtype] == 8 else [short, long, *_cut_rows(direction, dtype)]


def mixed(layout: Layout) -> Sequence[Tile]:
    """The one tile of generic access for contiguous channels, and for rows of mixed dtypes and dtypes of 8 bytes. It takes
    rows, or columns, of any size."""
    return [{"warps": 4, "rows": 1, "steps": 1} if layout == "time_last" else registers.WIDE]


def _misaligned_rows(direction: Direction, dtype: str) -> Iterator[Tile]:
    tile = {"warps": 1, "rows": 4, "lanes": 16, "pieces": 2, "stages": 1}
    yield from rings.resident(direction, dtype, tile, 8)


def _cut_rows(direction: Direction, dtype: str) -> Iterator[Tile]:
    """A tile for few long rows, which are cut into segments. Every GPU has room for it. Dtypes of 8 bytes have
    none."""
    if ITEM_SIZE[dtype] < 8:
        tile = {"warps": 1, "rows": 8, "lanes": 32, "pieces": 2, "stages": 3, "prefix_lead": 2}
        yield from rings.resident(direction, dtype, tile, 1)


def packed_rows(direction: Direction, dtype: str) -> Iterator[Tile]:
    """A tile for rows in which sequences are packed, for GPUs that have room for it. Dtypes of 8 bytes have none."""
    if ITEM_SIZE[dtype] < 8:
        rows, pieces = (12, 4) if direction == "forward" else (16, 2)
        tile = {"warps": 1, "rows": rows, "lanes": 32, "pieces": pieces}
        yield from rings.resident(direction, dtype, tile | {"stages": 4, "prefix_lead": 2}, 1)


def _cut_packed_rows(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Tiles for rows in which sequences are packed, of which warps keep more in shared memory."""
    for tile in rings.time_last(direction, dtype) if ITEM_SIZE[dtype] < 8 else ():
        if "prefix_lead" in tile and int(tile["pieces"]) <= 4 and int(tile["rows"]) <= 16:
            yield tile


def _column_and_cut(direction: Direction, dtype: str, access: str) -> Iterator[Tile]:
    """A tile for many channels, whose columns are scanned serially in time, and one for few, which are cut into
    segments."""
    item = ITEM_SIZE[dtype]
    warps = 8 if access == "aligned" else 4  # misaligned rows take more registers
    serial = {"warps": warps, "lanes_across": 32} if item < 8 else {"warps": 4, "lanes_across": 16}
    ring = {"steps": 8, "stages": 3} if item < 8 else {"steps": 16, "stages": 2}
    serial |= {"vector": 1 if access == "aligned" else 2, **ring}
    yield from rings.resident(direction, dtype, serial, 2, access)
    if access == "aligned" and item < 8:  # generic variants take few channels of 8 bytes
        cut = {"warps": 4, "lanes": max(2, item // 2), "vector": 16 // item, "steps": 4}
        yield from rings.resident(direction, dtype, cut | {"stages": 3, "prefix_lead": 1}, 1)


def serves(direction: Direction, statics: Pins, target: Target) -> bool:
    """Whether an architecture's GPUs have room for the variant's shared memory. PTX has to fit the GPUs with the
    least."""
    tile = {name: value for name, value in statics if isinstance(value, int)}
    pins = dict(statics)
    dtype, access = str(pins["dtype"]), str(pins["access"])
    if "chunks" in tile:
        return resident.serves(direction, dtype, tile, target)
    if "stages" not in tile:
        return True
    # Archives have machine code for every GPU with the least shared memory, so PTX runs on none of these GPUs.
    columns = 0 if target.is_ptx else rings.column_shared(dtype, access, tile)
    return rings.most_shared(direction, dtype, access, tile) + columns <= target.shared_memory


def ships(statics: Pins, target: Target) -> bool:
    """Whether wheels hold the variant. Kernels that were timed on an H200 alone, and that other kernels can stand in for, are in
    archives of capability 9.0 alone: the other archives have no room."""
    pins = dict(statics)
    access = pins["access"]
    wide = access == MISALIGNED and rings.is_wide(pins)
    replaceable = wide or access in (CONSTANT_GATE, MULTI_CTA, ONE_GATE, RESIDENT, SHORT)
    return not replaceable or (not target.is_ptx and target.capability == _TIMED)


def every(layout: Layout, direction: Direction, dtype: str, access: str) -> Iterator[Tile]:
    """The tiles that tuning may choose from."""
    if access == "generic":
        of_dtype = space.cuda_time_last if layout == "time_last" else space.cuda_channel_last
        yield from of_dtype(dtype)
    elif access in _OF_ACCESS:
        yield from _OF_ACCESS[access](direction, dtype)
    elif layout == "channel_last":
        yield from rings.channel_last(direction, dtype, access)
    elif access == VARLEN:
        yield from _cut_packed_rows(direction, dtype)
    else:
        if ITEM_SIZE[dtype] < 8:
            yield from ({"warps": warps, "rows": 1, "steps": 2} for warps in (2, 4, 8))
            if access == MISALIGNED:
                yield from ({"warps": 1, "rows": 4, "steps": steps} for steps in (1, 2))
        yield from rings.time_last(direction, dtype)
