"""The tiles of the CUDA kernels: those that every wheel holds, and those that tuning may choose from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan import registers, rings, space
from scan_registry.kernels.linear_scan.problem import Direction, Layout
from scan_registry.kernels.linear_scan.space import MISALIGNED, Tile
from scan_registry.kernels.model import ITEM_SIZE, Pins


def usual(layout: Layout, direction: Direction, dtype: str, access: str) -> Sequence[Tile]:
    """Those that every wheel holds."""
    if layout == "time_last":
        if access == MISALIGNED:
            return [*_misaligned_rows(direction, dtype), *_cut_rows(direction, dtype)]
        tiles = registers.time_last_tiles()
        return tiles if access == "generic" else [*tiles, *_cut_rows(direction, dtype)]
    if access == "generic":  # 32 channels wide, so that many run side by side, or narrow
        widths = (32, registers.NARROW)
        return [{"warps": 8, "lanes": lanes, "vector": 1, "steps": 8} for lanes in widths]
    return list(_column_and_cut(direction, dtype, access))


def _misaligned_rows(direction: Direction, dtype: str) -> Iterator[Tile]:
    tile = {"warps": 1, "rows": 4, "lanes": 16, "pieces": 2, "stages": 1}
    yield from rings.resident(direction, dtype, tile, 8)


def _cut_rows(direction: Direction, dtype: str) -> Iterator[Tile]:
    """One that any GPU has room for, of the dtypes whose few long rows are tuned."""
    if ITEM_SIZE[dtype] < 8:
        tile = {"warps": 1, "rows": 8, "lanes": 32, "pieces": 2, "stages": 3, "prefix_lead": 2}
        yield from rings.resident(direction, dtype, tile, 1)


def _column_and_cut(direction: Direction, dtype: str, access: str) -> Iterator[Tile]:
    """One for many channels, whose columns are passed over serially, and one for few, which are cut into segments."""
    each = ITEM_SIZE[dtype]
    warps = 8 if access == "aligned" else 4  # of misaligned rows lanes keep more in registers
    serial = {"warps": warps, "lanes_across": 32} if each < 8 else {"warps": 4, "lanes_across": 16}
    vector = 1 if access == "aligned" else 4 // each
    serial |= {"vector": vector, "steps": 8, "stages": 3}
    yield from rings.resident(direction, dtype, serial, 2, access)
    if access == "aligned":
        cut = {"warps": 4, "lanes": max(2, each // 2), "vector": 16 // each, "steps": 4}
        yield from rings.resident(direction, dtype, cut | {"stages": 3, "prefix_lead": 1}, 1)


def one_way(layout: Layout) -> tuple[str, ...]:
    """Accesses that read time as it lies, and turn it in registers for scans against it: two passes in one source, of which
    a driver is to compile one alone."""
    return ("aligned", MISALIGNED) if layout == "time_last" else ()


def serves(layout: Layout, statics: Pins, target: Target) -> bool:
    """PTX has a variant for each way, and machine code one for both."""
    pins = dict(statics)
    return pins.get("access") not in one_way(layout) or target.is_ptx == ("reverse" in pins)


def every(layout: Layout, direction: Direction, dtype: str, access: str) -> Iterator[Tile]:
    """What tuning may choose from."""
    if access == "generic":
        of_dtype = space.cuda_time_last if layout == "time_last" else space.cuda_channel_last
        yield from of_dtype(dtype)
    elif layout == "channel_last":
        yield from rings.channel_last(direction, dtype, access)
    else:
        if access != MISALIGNED and ITEM_SIZE[dtype] < 8:
            yield from ({"warps": warps, "rows": 1, "steps": 2} for warps in (2, 4, 8))
        yield from rings.time_last(direction, dtype)
