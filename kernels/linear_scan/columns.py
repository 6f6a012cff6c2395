"""Triton variants over contiguous channels, whose programs pass over a column of them serially in time.

A thread holds ``steps`` rows of ``vector`` channels; as many threads side by side as ``channels`` take are
a group, and the groups of ``warps`` share a tile. ``stages`` are the tile in hand and those on their way. The
source is ``triton_columns.py``.
"""

from __future__ import annotations

from itertools import product

from scan_registry.kernels.linear_scan.problem import Direction
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.model import ITEM_SIZE, Variant

#: Groups of a tile, which each of them looks at in turn.
_MOST_GROUPS = 16


def usual(direction: Direction, dtype: str, access: str) -> Tile:
    """What every wheel holds. Rows of 128 bytes, or of 256; where they are read element by element, little
    code instead of much at once."""
    size = ITEM_SIZE[dtype]
    forward = direction == "forward"
    if access == "generic":
        return _tile(4, 32, 1, 4 if size == 8 else 8, 2)
    if size == 2:
        return _tile(4, 64, 4, 8, 4) if forward else _tile(4, 64, 4, 4, 6)
    if size == 4:
        return _tile(4, 32, 2, 8, 3) if forward else _tile(4, 64, 2, 8, 4)
    return _tile(4, 32, 1, 4, 3)


def tiles(dtype: str, access: str) -> list[Tile]:
    """What tuning may choose from: one group to a warp, or several that share it."""
    if access == "generic":
        return [_tile(*statics, 2) for statics in product((4, 8), (16, 32), (1,), (4, 8))]
    vectors = (1,) if ITEM_SIZE[dtype] == 8 else (2, 4)
    steps = (2, 4) if dtype == "complex64" else (4, 8)
    choices = product((4, 8), (16, 32, 64), vectors, steps, (3, 4, 5, 6))
    return [
        _tile(*statics)
        for statics in choices
        if statics[1] <= 32 * statics[2] and _groups(*statics[:3]) <= _MOST_GROUPS
    ]


def _tile(warps: int, channels: int, vector: int, steps: int, stages: int) -> Tile:
    return {
        "warps": warps,
        "channels": channels,
        "vector": vector,
        "steps": steps,
        "stages": stages,
    }


def _groups(warps: int, channels: int, vector: int) -> int:
    return 32 * warps * vector // channels


def groups(variant: Variant) -> int:
    """How many share a tile."""
    return _groups(*(variant.number(name) for name in ("warps", "channels", "vector")))


def times(variant: Variant) -> int:
    """Times that a tile covers."""
    return groups(variant) * variant.number("steps")
