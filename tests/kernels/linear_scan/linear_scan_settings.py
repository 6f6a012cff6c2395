"""The problems that Triton's kernels of linear_scan solve in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, cycle, product
from math import prod

import torch

from scan_registry.kernels.linear_scan import problem as problems
from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.problem import Direction, Layout

BEFORE = ("initial_state", "final_state_grad")
STATES = (*BEFORE, "final_state", "initial_state_grad")


@dataclass(frozen=True)
class Setting:
    """A problem to solve, and how.

    sizes      outer, batch, channels, time
    gates      dtype of gates; that of the rest if empty
    broadcast  dimensions along which gates are broadcast
    offsets    bounds of the packed sequences
    omitted    parameters that are null
    poisoned   whether all sequences but the second hold infinities and NaNs
    far        whether initial states are beyond float16, and gates of 0 keep them from all other states
    tile       of the variant: rows and times; or channels, groups and steps; or along the unit and other
               dimension
    aligned    whether it is an aligned variant
    groups     of a reduction, if not as many as the problem says
    """

    sizes: tuple[int, int, int, int]
    dtype: str = "float32"
    gates: str = ""
    broadcast: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    reverse: bool = False
    omitted: tuple[str, ...] = ()
    poisoned: bool = False
    far: bool = False
    tile: tuple[int, ...] = (2, 16)
    aligned: bool = False
    groups: int = 0

    @property
    def sequences(self) -> int:
        return max(len(self.offsets) - 1, 0)

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return (*self.sizes[:3], self.sequences) if self.offsets else self.sizes[:3]

    def sums(self, dimension: int) -> bool:
        return dimension in self.broadcast and self.sizes[dimension] > 1

    def is_malformed(self) -> bool:
        ends = list(self.offsets) or [0, self.sizes[3]]
        return ends != sorted(ends) or (ends[0], ends[-1]) != (0, self.sizes[3])

    def dtype_of(self, tensor: str, direction: Direction) -> torch.dtype:
        if tensor in ("offsets", "workspace"):
            return torch.int64
        if tensor in STATES or (tensor, direction) == ("gates_grad", "reduction"):
            return reference.compute_dtype(getattr(torch, self.dtype))
        name = self.gates if tensor in ("gates", "gates_grad") and self.gates else self.dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype


#: Pairs of dtypes of tokens and of gates.
DTYPES = (
    ("float32", ""),
    ("bfloat16", ""),
    ("float16", ""),
    ("float64", ""),
    ("complex64", ""),
    ("bfloat16", "float32"),
    ("float16", "float32"),
)
MALFORMED = (
    (0, 30, 4, 20),
    (-7, 9, 99),
    (2**62, -(2**63), 2**63 - 1, -1, 3),
    (5, 5, 5),
    (0, 0, 0),
)
BUILT_TILE = problems.REDUCTION_TILE
#: What may be null in each direction, together.
OMITTED: dict[Direction, tuple[tuple[str, ...], ...]] = {
    "forward": ((), ("initial_state",), ("final_state",), ("initial_state", "final_state")),
    "backward": (
        (),
        ("gates_grad", "states"),
        BEFORE,
        ("tokens_grad", "initial_state_grad"),
        ("initial_state",),
        ("gates_grad", "states", "tokens_grad"),
    ),
    "reduction": ((), ("initial_state",)),
}


def scans(layout: Layout, direction: Direction) -> Iterator[Setting]:
    """Problems for generic and aligned variants, of few tiles: the interpreter takes 0.1 s for one
    of any size. All begin with one row or channel, or more than the tile has."""
    time_last = layout == "time_last"
    tile: tuple[int, ...] = (2, 16) if time_last else (4, 2, 4)
    times, rows = prod(tile[1:]), cycle((80, 48, 128))
    omitted, reverse = cycle(OMITTED[direction]), flags()
    for sizes in ((1, 1, 1, 1), (1, 2, 1, times), (2, 1, 3, times - 1), (1, 3, 1, 2 * times + 1)):
        for turned in (False, True):
            yield Setting(sizes, tile=tile, reverse=turned, omitted=next(omitted))
    for dtype, gates in DTYPES:
        sizes = (1, 2, 2, times + 3)
        yield Setting(sizes, dtype, gates, tile=tile, reverse=next(reverse))
    both_ways = product(("float32", "float16"), (False, True))
    for dtype, turned in (*both_ways, ("bfloat16", False), ("float64", True), ("complex64", False)):
        sizes, tiles = ((1, 1, 1, next(rows)), (1, 64)) if time_last else ((1, 1, 5, 9), tile)
        yield Setting(sizes, dtype, reverse=turned, tile=tiles, aligned=True)
        if dtype == "float16":
            far = Setting(sizes, dtype, reverse=turned, tile=tiles, far=True)
            yield from (far, replace(far, aligned=True), replace(far, offsets=(0, 4, sizes[3])))
    for broadcast in ((0,), (1,), (2,), (3,), (0, 1, 2, 3)):
        wider = (8, 16) if time_last else (8, 4, 4)
        yield Setting((2, 2, 2, 9), broadcast=broadcast, tile=wider, reverse=next(reverse))

    # Sequences that are empty, of one step, of a tile and a step, and of one tile.
    ends = (0, 0, 3, 3, times + 4, times + 5, 2 * times + 5, 2 * times + 5)
    for batch, turned in ((2, False), (1, True), (1, False), (2, True)):
        sizes = (1, batch, 1, ends[-1])
        yield Setting(sizes, offsets=ends, omitted=next(omitted), reverse=turned, tile=tile)
    for dtype, turned in product(("float32", "complex64"), (False, True)):
        yield Setting(
            (1, 1, 2, 14), dtype, offsets=(0, 5, 9, 9, 14), reverse=turned, poisoned=True, tile=tile
        )
    for offsets in MALFORMED:
        yield Setting((1, 1, 2, 20), offsets=offsets, reverse=next(reverse), tile=tile)

    built: tuple[tuple[int, ...], ...] = ((1, 256), (1, 1024)) if time_last else ((64, 8, 8),)
    for tile, aligned in product(built, (False, True)):
        sizes = (1, 1, 1, tile[1] + 16) if time_last else (1, 1, 80, 65)
        yield Setting(sizes, tile=tile, aligned=aligned)


def reductions(layout: Layout) -> Iterator[Setting]:
    """Problems of one or several tiles of 4 along the unit dimension and 16 along the other."""
    small, reverse, omitted = (4, 16), flags(), cycle(OMITTED["reduction"])
    several, one = ((17, 6), (3, 4)) if layout == "time_last" else ((5, 18), (4, 5))
    for number in range(1, 5):
        for broadcast in combinations(range(4), number):
            sizes = (2, 2, *(several if 3 in broadcast else one))
            yield Setting(
                sizes, broadcast=broadcast, reverse=next(reverse), omitted=next(omitted), tile=small
            )
    for dtype, gates in DTYPES:
        yield Setting((1, 2, *one), dtype, gates, (1, 2), reverse=next(reverse), tile=small)
    for broadcast in ((0, 1), (0, 1, 2), (0, 1, 2, 3)):
        yield Setting((3, 2, *one), broadcast=broadcast, groups=4, tile=small)
    for broadcast, turned in product(((2,), (1, 3)), (False, True)):
        ends = (0, 0, 3, 3, 4, 11, 19, 19)
        yield Setting((1, 2, 3, 19), broadcast=broadcast, offsets=ends, reverse=turned, tile=small)
    for broadcast, turned in product(((1,), (1, 2)), (False, True)):
        ends = (0, 5, 9, 9, 14)
        yield Setting(
            (1, 2, 2, 14), broadcast=broadcast, offsets=ends, reverse=turned, poisoned=True,
            tile=small,
        )  # fmt: skip
    for offsets in MALFORMED:
        sizes = (1, 1, 2, 20)
        yield Setting(sizes, broadcast=(2,), offsets=offsets, reverse=next(reverse), tile=small)
    for broadcast in ((1, 2), (1, 3)):
        yield Setting((1, 2, 65, 33), broadcast=broadcast, tile=BUILT_TILE)


def flags() -> Iterator[bool]:
    return cycle((False, True))
