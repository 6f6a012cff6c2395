"""What the linear_scan family is made of: kernels, variants, what each accepts and how it launches.

Sources: ``time_last_*.cu``, ``channel_last_*.cu`` and ``reduction.cu`` with their ``.cuh`` headers,
and ``triton_kernels.py``. ``parameters`` gives the signature of every entry point.

Access ``aligned`` moves 16 bytes at a time and takes scans without options, ``packed`` likewise those
whose sequences are packed; ``generic`` takes all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

from scan_registry.kernels.linear_scan.problem import (
    DIMENSIONS,
    REDUCTION_TILE,
    STRIDED,
    Direction,
    Layout,
    LinearScanProblem,
    Strides,
    ceil_div,
)
from scan_registry.kernels.model import (
    ITEM_SIZE,
    Family,
    Kernel,
    Language,
    Launch,
    Parameter,
    Sample,
    Static,
    Variant,
)

FAMILY_NAME = "linear_scan"
DTYPES = tuple(ITEM_SIZE)
#: Of tokens and gates, where they differ: narrow tokens under float32 gates.
MIXED = (("bfloat16", "float32"), ("float16", "float32"))
ACCESSES = ("aligned", "generic")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "reduction")
LAYOUTS: tuple[Layout, ...] = ("time_last", "channel_last")

#: Static parameters beside dtypes and access.
Tile: TypeAlias = Mapping[str, Static]

_POINTERS: dict[Direction, tuple[str, ...]] = {
    "forward": (
        "gates",
        "tokens",
        "initial_state",
        "states",
        "final_state",
        "offsets",
        "workspace",
    ),
    "backward": (
        "gates",
        "states",
        "states_grad",
        "initial_state",
        "final_state_grad",
        "gates_grad",
        "tokens_grad",
        "initial_state_grad",
        "offsets",
        "workspace",
    ),
    "reduction": ("tokens_grad", "states", "initial_state", "gates_grad", "offsets"),
}


def parameters(direction: Direction) -> tuple[Parameter, ...]:
    """The signature shared by all kernels of one direction."""
    pointers = [Parameter(name, "pointer") for name in _POINTERS[direction]]
    sizes = ["outer", "batch", "channels", "time", "sequences"]
    strides = [f"{tensor}_{each}" for tensor, each in product(STRIDED[direction], DIMENSIONS)]
    groups = ["groups"] if direction == "reduction" else []
    integers = (Parameter(name, "i64") for name in (*sizes, *strides, *groups, "flags"))
    return (*pointers, *integers)


def _state(dtype: str) -> str:
    """The dtype that the recurrence is computed in."""
    return dtype if ITEM_SIZE[dtype] == 8 else "float32"


def _variants(
    kernel: str, language: Language, tiles: Callable[[str, str], tuple[Tile, ...]]
) -> tuple[Variant, ...]:
    """One for each tile that ``tiles`` gives a dtype and an access; mixed dtypes are generic."""
    kinds = [
        *((dtype, dtype, access) for dtype, access in product(DTYPES, (*ACCESSES, "packed"))),
        *((dtype, gates, "generic") for dtype, gates in MIXED),
    ]
    return tuple(
        Variant(
            FAMILY_NAME,
            kernel,
            language,
            (("dtype", dtype), ("gates", gates), ("access", access), *tile.items()),
        )
        for dtype, gates, access in kinds
        for tile in tiles(dtype, access)
    )


def _reductions(kernel: str, language: Language, tile: Tile) -> tuple[Variant, ...]:
    """A reduction writes partial sums in the dtype of the state, whatever the gates' is."""
    return tuple(
        Variant(FAMILY_NAME, kernel, language, (("dtype", dtype), *tile.items()))
        for dtype in DTYPES
    )


def _rejects_dtype(variant: Variant, problem: LinearScanProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    return None


def _rejects_static(variant: Variant, problem: LinearScanProblem) -> str | None:
    if reason := _rejects_dtype(variant, problem):
        return reason
    if variant.text("gates") != problem.gates_dtype:
        return f"gates in {variant.text('gates')}, not {problem.gates_dtype}"
    access = variant.text("access")
    if access == "packed" and problem.sequences == 0:
        return "no sequences are packed"
    if access == "aligned" and problem.sequences > 0:
        return "sequences are packed"
    if access != "generic" and not problem.plain():
        return "gates are mixed or broadcast, or batches do not fold into one dimension"
    return None


def _reduction_launch(
    variant: Variant, problem: LinearScanProblem, multiprocessors: int
) -> Launch:
    cut = problem.reduction()
    channels, times = cut.across
    return Launch((cut.kept * cut.groups * channels * times, 1, 1), problem.scalars())


# --- CUDA -------------------------------------------------------------------------------------


def _time_last_tiles(direction: Direction, dtype: str, access: str) -> tuple[Tile, ...]:
    """Warps that share a row, and rows or warps side by side. Of generic variants the chunks a lane
    holds; of aligned ones the lanes that share a row, the pieces a lane holds, the tiles on their way to
    shared memory and the one there, and the blocks per SM."""
    if access == "packed":
        return ()
    if access == "generic":
        return (
            {"warps": 1, "rows": 4, "steps": 1},
            {"warps": 4, "rows": 1, "steps": 2},
        )
    ring: Tile = {"stages": 3 if direction == "forward" else 2, "blocks": 3}
    return (
        *({"warps": 1, "rows": 4, "lanes": lanes, "pieces": 4, **ring} for lanes in (1, 4, 8, 32)),
        {"warps": 8, "rows": 1, "lanes": 32, "pieces": 4, "stages": 2, "blocks": 2},
    )


def _channel_last_tiles(direction: Direction, dtype: str, access: str) -> tuple[Tile, ...]:
    """Warps per block, threads along the channels, channels and rows per thread. Of aligned variants
    also the tiles on their way to shared memory and the one there, and the blocks per SM."""
    if access == "generic":
        return ({"warps": 8, "lanes": 32, "vector": 1, "steps": 8},)
    vector = 16 // ITEM_SIZE[dtype]
    return tuple(
        {
            "warps": 4,
            "lanes": lanes,
            "vector": vector,
            "steps": 8,
            "stages": 3 if direction == "forward" else 2,
            "blocks": 2,
        }
        for lanes in ((8, 4, 2) if access == "aligned" else (8,))
    )


def _cuda_constants(variant: Variant) -> dict[str, Static]:
    statics = dict(variant.statics)
    tile = {name.upper(): value for name, value in variant.statics if isinstance(value, int)}
    return {
        "ELEMENT": variant.text("dtype"),
        "GATE_ELEMENT": statics.get("gates", variant.text("dtype")),
        "ALIGNED": int(statics.get("access") in ("aligned", "packed")),
        "PACKED": int(statics.get("access") == "packed"),
        **tile,
    }


#: That a kernel of aligned rows numbers in 32 bits.
_MOST_ROWS = 2**31 - 1


def _cuda_accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    if reason := _rejects_static(variant, problem):
        return reason
    chunk = problem.chunk() if problem.layout == "time_last" else variant.number("vector")
    if variant.text("access") != "generic" and not problem.whole_chunks(chunk):
        return f"rows are not made of whole chunks of {chunk} {problem.dtype} in aligned memory"
    if variant.text("access") != "generic" and problem.batch * problem.channels > _MOST_ROWS:
        return f"{problem.batch * problem.channels} rows; it counts {_MOST_ROWS}"
    if dict(variant.statics).get("lanes", 32) < 32 and not (
        problem.layout == "channel_last" or problem.folds()
    ):
        return "rows do not follow one another at one stride"
    return None


def _time_last_tile(variant: Variant) -> int:
    """Times of a tile."""
    chunk = 16 // ITEM_SIZE[variant.text("dtype")]
    if variant.text("access") == "aligned":
        return variant.number("warps") * variant.number("lanes") * variant.number("pieces") * chunk
    return variant.number("warps") * variant.number("steps") * 32 * chunk


def _time_last_shared(direction: Direction, variant: Variant) -> int:
    """Bytes of the ring of tiles."""
    if variant.text("access") == "generic":
        return 0
    pieces = (2 if direction == "forward" else 3) * 32 * variant.number("pieces")
    if direction == "backward":  # of the states one more a row
        pieces += 32 // variant.number("lanes")
    return 16 * variant.number("stages") * variant.number("warps") * variant.number("rows") * pieces


def _walk_cost(variant: Variant, problem: LinearScanProblem, tile: int) -> float:
    """The largest tile, provided that a row fills half as many of them as the tile has warps.

    The more warps meet at a tile's barrier, the more tiles it takes to hide that.
    """
    generic = 0.5 if variant.text("access") == "generic" else 0.0
    steps = problem.time // max(1, problem.sequences)
    enough = steps >= tile * variant.number("warps") / 2
    return (-tile if enough else tile) + generic


#: Rows that keep a large GPU busy with a warp for each.
_ENOUGH_ROWS = 1000


def _time_last_cost(variant: Variant, problem: LinearScanProblem) -> float:
    """Of aligned variants the one whose tiles are filled best, and of those the widest; where there are
    few rows, the one whose warps share them."""
    if variant.text("access") == "generic":
        return 1e9 + _walk_cost(variant, problem, _time_last_tile(variant))
    rows = problem.batch * problem.channels
    tile = _time_last_tile(variant)
    few = rows < _ENOUGH_ROWS and problem.time > 1024
    fits = (variant.number("warps") > 1) == few
    return (0 if fits else 1e6) + 1000 * ceil_div(problem.time, tile) * tile / problem.time - tile


def _time_last_launch(
    variant: Variant, problem: LinearScanProblem, multiprocessors: int
) -> Launch:
    rows = problem.outer * problem.batch * problem.channels
    blocks = ceil_div(rows, variant.number("rows"))
    if variant.text("access") == "generic":
        return Launch((blocks, 1, 1), problem.scalars())
    at_once = multiprocessors * variant.number("blocks")
    if variant.number("warps") > 1:
        levels = ceil_div(problem.time, _time_last_tile(variant))
        return _stream_launch(variant, problem, multiprocessors, rows, levels, 1)
    blocks = ceil_div(rows, variant.number("rows") * 32 // variant.number("lanes"))
    return Launch((at_once if blocks > 4 * at_once else blocks, 1, 1), problem.scalars())


def _channel_last_tile(variant: Variant) -> tuple[int, int]:
    """Channels and times of a tile."""
    lanes, vector = variant.number("lanes"), variant.number("vector")
    return lanes * vector, variant.number("warps") * (32 // lanes) * variant.number("steps")


def _columns(variant: Variant, problem: LinearScanProblem) -> int:
    channels, _ = _channel_last_tile(variant)
    return problem.outer * problem.batch * ceil_div(problem.channels, channels)


#: Columns that keep a large GPU busy.
_ENOUGH_COLUMNS = 120


def _channel_last_cost(variant: Variant, problem: LinearScanProblem) -> float:
    """Of those that make enough columns the widest, else the narrowest; aligned before generic."""
    if variant.text("access") == "generic":
        return 1e9
    channels, _ = _channel_last_tile(variant)
    return -channels if _columns(variant, problem) >= _ENOUGH_COLUMNS else channels


def _channel_last_shared(direction: Direction, variant: Variant) -> int:
    """Bytes of the ring of tiles."""
    if variant.text("access") == "generic":
        return 0
    inputs = 2 if direction == "forward" else 3
    channels, times = _channel_last_tile(variant)
    return variant.number("stages") * inputs * channels * times * ITEM_SIZE[variant.text("dtype")]


#: Maps that a thread of a split scan fetches of the tiles before its own.
_LOOK = 4


def _lines(words: int) -> int:
    """Of 16 bytes, each of which takes three words and a mark."""
    return ceil_div(words, 3)


def _stream_launch(
    variant: Variant,
    problem: LinearScanProblem,
    multiprocessors: int,
    columns: int,
    levels: int,
    scans: int,
) -> Launch:
    """A block for each column of so many scans where those fill the GPU; else columns are split into
    their levels, and as many blocks as it holds share the tiles."""
    if columns >= 0.75 * multiprocessors or levels < 4:
        return Launch((columns, 1, 1), problem.scalars())
    words = ITEM_SIZE[_state(problem.dtype)] // 4
    with_rest = ITEM_SIZE[problem.dtype] >= 4
    group = _LOOK * 32 * variant.number("warps") // scans
    maps = columns * levels * _lines((3 if with_rest else 2) * words)
    leaving = columns * (levels // group) * _lines((2 if with_rest else 1) * words)
    blocks = min(columns * levels, multiprocessors * variant.number("blocks"))
    return Launch((blocks, 1, 1), problem.scalars(), 16 * (1 + scans * (maps + leaving)))


def _channel_last_launch(
    variant: Variant, problem: LinearScanProblem, multiprocessors: int
) -> Launch:
    if variant.text("access") != "generic":
        channels, times = _channel_last_tile(variant)
        columns, levels = _columns(variant, problem), ceil_div(problem.time, times)
        return _stream_launch(variant, problem, multiprocessors, columns, levels, channels)
    channels, times = _channel_last_tile(variant)
    columns = problem.outer * problem.batch * ceil_div(problem.channels, channels)
    tiles = ceil_div(problem.time, times)
    with_rest = 2 if ITEM_SIZE[problem.dtype] >= 4 else 1
    each = with_rest * ITEM_SIZE[_state(problem.dtype)] // 4
    words = min(tiles - 1, 2) * columns * channels * each
    return Launch((columns * tiles, 1, 1), problem.scalars(), 16 + 8 * words if tiles > 1 else 0)


def _cuda_kernel(layout: Layout, direction: Direction) -> Kernel:
    name = f"{layout}_{direction}"
    time_last = layout == "time_last"
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        source=f"{name}.cu",
        entry=f"{FAMILY_NAME}_{name}",
        parameters=parameters(direction),
        variants=_variants(
            name,
            "cuda",
            partial(_time_last_tiles if time_last else _channel_last_tiles, direction),
        ),
        constants=_cuda_constants,
        warps=lambda variant: (
            variant.number("warps") * (variant.number("rows") if time_last else 1)
        ),
        accepts=_cuda_accepts,
        cost=_time_last_cost if time_last else _channel_last_cost,
        launch=_time_last_launch if time_last else _channel_last_launch,
        shared=partial(_time_last_shared if time_last else _channel_last_shared, direction),
    )


def _cuda_reduction(layout: Layout) -> Kernel:
    name = f"{layout}_reduction"
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        source="reduction.cu",
        entry=f"{FAMILY_NAME}_reduction",
        parameters=parameters("reduction"),
        variants=_reductions(name, "cuda", {"warps": 8}),
        constants=lambda variant: {
            **_cuda_constants(variant),
            "TIME_LAST": int(layout == "time_last"),
        },
        warps=lambda variant: variant.number("warps"),
        accepts=_rejects_dtype,
        cost=lambda variant, problem: 0.0,
        launch=_reduction_launch,
    )


# --- Triton -----------------------------------------------------------------------------------


#: As CUDA limits them. Packed sequences lie along y, and more of them along z.
_MOST_BLOCKS_Y = 65_535


def _triton_tiles(layout: Layout, dtype: str, access: str) -> tuple[Tile, ...]:
    """Rows or channels of a program, times per step of its walk along time, warps."""
    if access == "packed":
        return ()
    wide = ITEM_SIZE[dtype] == 8  # of which fewer fit in the registers
    if layout == "channel_last":
        if wide:
            return ({"channels": 16, "times": 16, "warps": 8 if dtype == "complex64" else 4},)
        return ({"channels": 32, "times": 16, "warps": 2 if access == "aligned" else 4},)
    times = 128 if access == "generic" else 256
    short: Tile = {"rows": 1, "times": times, "warps": 1}
    long: Tile = {"rows": 1, "times": 4 * times, "warps": 4}
    tiles = (short,) if wide else (short, long)
    if access == "generic":
        return tiles
    # Which way 16 bytes are read is for the compiler to know.
    return tuple({**tile, "reverse": way} for tile, way in product(tiles, (0, 1)))


def _triton_constants(variant: Variant) -> Mapping[str, Static]:
    statics = dict(variant.statics)
    tile = {
        name.upper(): value
        for name, value in variant.statics
        if isinstance(value, int) and name != "warps"
    }
    complex_numbers = {"COMPLEX": int(variant.text("dtype") == "complex64")}
    if "access" not in statics:
        return complex_numbers | tile
    if "rows" in statics:
        tile.setdefault("REVERSE", 0)
    return {"ALIGNED": int(statics["access"] == "aligned")} | complex_numbers | tile


def _triton_elements(variant: Variant, direction: Direction) -> dict[str, str]:
    """What each pointer points to; a complex number is two floats in Triton."""
    dtype = variant.text("dtype")
    state = _state(dtype)
    gates = state if direction == "reduction" else variant.text("gates")
    of = {"gates": gates, "gates_grad": gates, "offsets": "int64", "workspace": "int64"}
    boundary = ("initial_state", "final_state", "initial_state_grad", "final_state_grad")
    of |= dict.fromkeys(boundary, state)
    found = {name: of.get(name, dtype) for name in _POINTERS[direction]}
    return {n: "float32" if each == "complex64" else each for n, each in found.items()}


def _triton_divisible(variant: Variant, layout: Layout, direction: Direction) -> frozenset[str]:
    """In the aligned variants: the sequences, their rows' length and the strides between rows."""
    if dict(variant.statics).get("access") != "aligned":
        return frozenset()
    across = ("batch", "channel") if layout == "time_last" else ("batch", "time")
    sequences = {name for name in STRIDED[direction] if name != "state"}
    strides = {f"{tensor}_{dim}" for tensor in sequences for dim in across}
    row = "time" if layout == "time_last" else "channels"
    outputs = ("gates_grad", "tokens_grad") if direction == "backward" else ()
    return frozenset({*(sequences - {"grads"}), *outputs, *strides, row})


def _triton_accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    if reason := _rejects_static(variant, problem):
        return reason
    if variant.text("access") == "aligned" and not problem.whole_chunks(16):
        return "row length and strides are not multiples of 16 elements"
    reverse = dict(variant.statics).get("reverse")
    if reverse is not None and reverse != problem.reverse:
        return "it scans the other way"
    return None


def _triton_cost(variant: Variant, problem: LinearScanProblem) -> float:
    return _walk_cost(variant, problem, variant.number("times"))


def _triton_launch(variant: Variant, problem: LinearScanProblem, multiprocessors: int) -> Launch:
    batches = problem.outer * problem.batch
    if problem.layout == "time_last":
        programs = ceil_div(batches * problem.channels, variant.number("rows"))
    else:
        programs = batches * ceil_div(problem.channels, variant.number("channels"))
    sequences = max(1, problem.sequences)
    y = min(sequences, _MOST_BLOCKS_Y)
    return Launch((programs, y, ceil_div(sequences, y)), problem.scalars())


def _triton_kernel(layout: Layout, direction: Direction) -> Kernel:
    name = f"{layout}_{direction}"
    reduction = direction == "reduction"
    unit, other = REDUCTION_TILE
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="triton",
        source="triton_kernels.py",
        entry=name,
        parameters=parameters(direction),
        variants=_reductions(name, "triton", {"unit": unit, "other": other, "warps": 4})
        if reduction
        else _variants(name, "triton", partial(_triton_tiles, layout)),
        constants=_triton_constants,
        warps=lambda variant: variant.number("warps"),
        accepts=_rejects_dtype if reduction else _triton_accepts,
        cost=(lambda variant, problem: 0.0) if reduction else _triton_cost,
        launch=_reduction_launch if reduction else _triton_launch,
        divisible=lambda variant: _triton_divisible(variant, layout, direction),
        elements=lambda variant: _triton_elements(variant, direction),
        # Where rests are kept: a sum's rounding error can be had only if its terms are rounded first.
        fuses=lambda variant: ITEM_SIZE[variant.text("dtype")] < 4,
    )


# --- The family -------------------------------------------------------------------------------


def _sample(layout: Layout, direction: Direction, dtype: str, access: str) -> Sample:
    batch, channels, time = (8, 1024, 2048) if access == "aligned" else (8, 1021, 2039)
    strides = (
        Strides(0, channels * time, time, 1)
        if layout == "time_last"
        else Strides(0, channels * time, 1, channels)
    )
    problem = LinearScanProblem(
        direction=direction,
        layout=layout,
        dtype=dtype,
        gates_dtype=dtype,
        outer=1,
        batch=batch,
        channels=channels,
        time=time,
        strides=(*(strides,) * (len(STRIDED[direction]) - 1), Strides(0, channels, 1, 0)),
        alignment=16 if access == "aligned" else ITEM_SIZE[dtype],
    )
    return Sample(problem, dtype, access)


def _kernels(language: Language) -> tuple[Kernel, ...]:
    if language == "triton":
        return tuple(_triton_kernel(*each) for each in product(LAYOUTS, DIRECTIONS))
    scans = product(LAYOUTS, DIRECTIONS[:2])
    return (
        *(_cuda_kernel(layout, direction) for layout, direction in scans),
        *(_cuda_reduction(layout) for layout in LAYOUTS),
    )


FAMILY = Family(
    name=FAMILY_NAME,
    summary="x[t] = gates[t] * x[t-1] + tokens[t]",
    folder=Path(__file__).parent,
    kernels=(*_kernels("cuda"), *_kernels("triton")),
    samples=tuple(_sample(*each) for each in product(LAYOUTS, DIRECTIONS, DTYPES, ACCESSES)),
)
