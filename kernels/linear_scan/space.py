"""What tuning may choose from, and how it compares problems: the tiles that each kernel's source allows.

A kind is a dtype, the gates' dtype and an access. Of each, a space holds a few dozen tiles; what does
not fit a GPU's registers or spills is found out by compiling, and is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TypeAlias

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.problem import DIMENSIONS, LinearScanProblem
from scan_registry.kernels.model import (
    ITEM_SIZE,
    Language,
    Pins,
    Space,
    Static,
    Tunable,
    Variant,
)
from scan_registry.kernels.tuning import Model, Shape, Tuning

FAMILY_NAME = "linear_scan"
FOLDER = Path(__file__).parent
DTYPES = tuple(ITEM_SIZE)
#: Of tokens and gates, where they differ: narrow tokens under float32 gates.
MIXED = (("bfloat16", "float32"), ("float16", "float32"))
ACCESSES = ("aligned", "generic")
#: Aligned too, with sequences packed along time; no default variant has it.
VARLEN = "varlen"
#: Rows that start or end off a 16-byte boundary, at the same offset to it in all tensors.
MISALIGNED = "misaligned"
#: Rows of few contiguous channels, without gaps between rows. Each tensor may begin at any address.
NARROW = "narrow"
#: Rows of contiguous channels at any address, read element by element.
SCALAR = "scalar"
#: Few contiguous channels at any address, each with one gate for all time steps.
CONSTANT_GATE = "constant_gate"
#: Short rows of contiguous time, without gaps between rows.
SHORT = "short"
#: Long aligned rows of contiguous time, each with one gate for all time steps.
ONE_GATE = "one_gate"
#: Few contiguous channels at any address, or rows of contiguous time, each with one gate for all time steps, that shared memory has
#: room for.
RESIDENT = "resident"
#: Misaligned rows of contiguous channels, in columns that several CTAs share.
MULTI_CTA = "multi_cta"
#: The accesses beside generic access that do not take sequences, by layout. Of those that accept a problem, the first one is
#: chosen; but short rows, and scans that shared memory has room for, come before all others.
PLAIN = {
    "time_last": ("aligned", SHORT, MISALIGNED, ONE_GATE, RESIDENT),
    "channel_last": (CONSTANT_GATE, MULTI_CTA, SCALAR, "aligned", NARROW, MISALIGNED, RESIDENT),
}

#: Static parameters beside dtypes and access.
Tile: TypeAlias = Mapping[str, Static]
#: Dtype and access to tiles.
Tiles: TypeAlias = Callable[[str, str], Iterable[Tile]]

#: Tuning does not try tiles so short that a scan would have more than a quarter of this many.
_MOST_TILES = 1 << 18

#: Problems with broadcast gates are as far from others as a factor of this in one size.
_BROADCAST = 16.0
#: The weights of sizes for contiguous channels. Which tile is fast depends on the number of channels of all batches,
#: ``lines``, since they fill the GPU. It depends little on the channels of one batch and on the time steps.
COLUMN_WEIGHTS = {"channels": 0.1, "time": 0.125}


def scans(
    tiles: Tiles, accesses: Sequence[str] = ACCESSES, mixed: Sequence[Tile] | None = None
) -> Space:
    """Variants of a forward or backward kernel, for every kind; mixed dtypes, and dtypes of 8 bytes in misaligned
    rows, have generic access alone. Mixed dtypes have the tiles ``mixed``, or those of their tokens."""
    kinds = [
        *(
            (dtype, dtype, access)
            for dtype, access in product(DTYPES, accesses)
            if access != MISALIGNED or ITEM_SIZE[dtype] < 8
        ),
        *((dtype, gates, "generic") for dtype, gates in MIXED),
    ]

    def of(kind: Pins) -> Iterator[Pins]:
        (_, dtype), (_, gates), (_, access) = kind
        own = mixed if mixed is not None and dtype != gates else tiles(str(dtype), str(access))
        return (tuple(tile.items()) for tile in own)

    return Space(tuple((("dtype", d), ("gates", g), ("access", a)) for d, g, a in kinds), of)


def reductions(tile: Tile) -> Space:
    """A reduction writes partial sums in the dtype of the state, whatever the gates' is."""
    kinds = tuple((("dtype", dtype),) for dtype in DTYPES)
    return Space(kinds, lambda kind: (tuple(tile.items()),))


# --- CUDA -------------------------------------------------------------------------------------


def cuda_time_last(dtype: str) -> list[Tile]:
    """Tiles of generic access: one warp for each of several rows, or several warps for one row. A lane holds at most
    64 bytes of a tensor."""
    chunk = min(16, 4 * ITEM_SIZE[dtype])
    return [
        {"warps": warps, "rows": rows, "steps": steps}
        for (warps, rows), steps in product(((1, 4), (1, 8), (4, 1), (8, 1)), (1, 2, 4))
        if steps * chunk <= 64
    ]


def cuda_channel_last(dtype: str) -> list[Tile]:
    """Tiles of generic access: a lane has a single channel, and loads its elements one by one."""
    return [
        {"warps": warps, "lanes": lanes, "vector": 1, "steps": steps}
        for warps, lanes, steps in product((4, 8), (4, 16, 32), (4, 8, 16))
    ]


# --- Triton -----------------------------------------------------------------------------------

_HELD = range(4, 17)  # elements of each tensor in a thread


def triton_time_last(dtype: str, access: str) -> list[Tile]:
    """Tiles of as many elements as threads can hold. Aligned variants are separate for each direction of time."""
    tiles: list[Tile] = [
        {"rows": rows, "times": times, "warps": warps}
        for rows, times, warps in product((1, 2, 4), (64, 128, 256, 512, 1024, 2048), (1, 2, 4, 8))
        if rows * times // (32 * warps) in _HELD
    ]
    if access == "generic":
        return tiles
    return [{**tile, "reverse": way} for tile, way in product(tiles, (0, 1))]


# --- Problems ---------------------------------------------------------------------------------


def tunable(
    name: str,
    language: Language,
    space: Space,
    defaults: Space,
    accepts: Callable[[Variant, LinearScanProblem], str | None],
    tile: Callable[[Variant], int],
    ships: Callable[[Pins, Target], bool] = lambda statics, target: True,
    packs: Callable[[LinearScanProblem], bool] = lambda problem: False,
    tile_efficiency: Callable[[str, Mapping[str, float]], float] = lambda text, sizes: 1.0,
    predicted: Callable[[Model, str, Shape, int], float | None] = (
        lambda model, text, shape, count: None
    ),
) -> Tunable:
    """What a kernel of scans says of its tuning. ``tile`` is how many time steps a tile covers, ``ships`` whether an architecture's
    archive holds a variant, and ``packs`` whether there are ``varlen`` variants for a problem."""
    variants = (
        Variant(FAMILY_NAME, name, language, statics)
        for statics in defaults
        if ("access", "generic") not in statics
    )
    # Short rows, and scans that shared memory has room for, come first: other accesses take these, too, but are slower.
    closer = sorted(variants, key=lambda variant: variant.text("access") not in (SHORT, RESIDENT))

    def shape_of(problem: LinearScanProblem, target: Target | None = None) -> Shape:
        there = (v for v in closer if target is None or ships(v.statics, target))
        return shape(there, accepts, packs, problem)

    head = f"{FAMILY_NAME}.{name}:{language}"

    def tunings() -> tuple[Tuning, ...]:
        from scan_registry.kernels.tables import shipped  # most processes have no use for files

        return shipped(FOLDER, head)

    def timings() -> tuple[Tuning, ...]:
        from scan_registry.kernels.tables import timed

        return timed(FOLDER, head)

    return Tunable(
        space=space,
        shape=shape_of,
        worth=lambda variant, problem: worth(tile, shape_of(problem), variant),
        tile_efficiency=tile_efficiency,
        predicted=predicted,
        given=frozenset({"reverse"}),
        tunings=tunings,
        timings=timings,
    )


def shape(
    closer: Iterable[Variant],
    accepts: Callable[[Variant, LinearScanProblem], str | None],
    packs: Callable[[LinearScanProblem], bool],
    problem: LinearScanProblem,
) -> Shape:
    """Where a problem lies: it has the access of the first of the variants ``closer`` that accepts it."""
    fits = (
        variant.text("access")
        for variant in closer
        if variant.text("dtype") == problem.dtype and accepts(variant, problem) is None
    )
    access = next(fits, VARLEN if packs(problem) else "generic")
    kind = (("dtype", problem.dtype), ("gates", problem.gates_dtype), ("access", access))
    sequences = max(1, problem.sequences)
    batches = problem.outer * problem.batch
    columns = problem.layout == "channel_last"
    sizes = {
        "lines": batches * problem.channels,
        **({"channels": problem.channels} if columns else {}),
        "time": max(1.0, problem.time / sequences),
        "sequences": sequences,
        "broadcast": _BROADCAST if _broadcast(problem) else 1.0,
    }
    pins = ",".join(f"{name}={value}" for name, value in kind)
    return Shape(pins, sizes, COLUMN_WEIGHTS if columns else {})


def _broadcast(problem: LinearScanProblem) -> bool:
    strides = vars(problem.strides_of("gates"))
    sizes = zip(DIMENSIONS, problem.sizes, strict=True)
    return any(size > 1 and strides[name] == 0 for name, size in sizes)


def worth(tile: Callable[[Variant], int], shape: Shape, variant: Variant) -> bool:
    """Whether tuning should try a variant on problems of this shape. It does not try generic access where another
    access serves, tiles much longer than a sequence, which leave most of a CTA idle, or much shorter ones, which take
    seconds. ``tile`` is how many time steps a tile covers."""
    access = dict(item.split("=") for item in shape.kind.split(","))["access"]
    times = tile(variant), shape.sizes["time"]
    return variant.text("access") == access and times[0] <= 4 * times[1] <= _MOST_TILES * times[0]
