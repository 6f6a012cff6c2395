"""What the linear_scan family is made of: kernels, variants, what each accepts and how it launches.

Sources: ``time_last_*.cu``, ``channel_last_*.cu`` and ``reduction.cu`` with their ``.cuh`` headers,
and ``triton_kernels.py``. ``parameters`` gives the signature of every entry point.

Access ``aligned`` moves 16 bytes at a time and takes scans without options, ``packed`` likewise those
whose sequences are packed; ``generic`` takes all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

from scan_registry.kernels.linear_scan import space, streams
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
from scan_registry.kernels.linear_scan.space import (
    ACCESSES,
    DTYPES,
    FAMILY_NAME,
    FOLDER,
    Tile,
    reductions,
    scans,
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

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "reduction")
LAYOUTS: tuple[Layout, ...] = ("time_last", "channel_last")

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


def _reduction_launch(variant: Variant, problem: LinearScanProblem, multiprocessors: int) -> Launch:
    cut = problem.reduction()
    channels, times = cut.across
    return Launch((cut.kept * cut.groups * channels * times, 1, 1), problem.scalars())


# --- CUDA -------------------------------------------------------------------------------------


def _time_last_tiles(dtype: str, access: str) -> tuple[Tile, ...]:
    """Warps that share a row, rows per block, chunks a lane holds."""
    short: Tile = {"warps": 1, "rows": 4, "steps": 1}
    wide = ITEM_SIZE[dtype] == 8
    warps = (2, 4, 8) if access == "aligned" and not wide else (4,)
    return (short, *({"warps": each, "rows": 1, "steps": 2} for each in warps))


def _channel_last_tiles(dtype: str, access: str) -> tuple[Tile, ...]:
    """Warps per block, threads along the channels, channels and rows per thread. Either way a tile is
    32 channels wide, so that many of them run side by side."""
    if access == "generic":
        return ({"warps": 8, "lanes": 32, "vector": 1, "steps": 8},)
    vector = 2 if ITEM_SIZE[dtype] == 8 else 4
    return ({"warps": 4, "lanes": 32 // vector, "vector": vector, "steps": 8},)


def _cuda_constants(variant: Variant) -> dict[str, Static]:
    statics = dict(variant.statics)
    tile = {name.upper(): value for name, value in variant.statics if isinstance(value, int)}
    return {
        "ELEMENT": variant.text("dtype"),
        "GATE_ELEMENT": statics.get("gates", variant.text("dtype")),
        "ALIGNED": int(statics.get("access") in ("aligned", "packed")),
        "PACKED": int(statics.get("access") == "packed"),
        "STAGES": 0,
        **tile,
    }


def _cuda_accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    if reason := _rejects_static(variant, problem):
        return reason
    chunk = problem.chunk() if problem.layout == "time_last" else variant.number("vector")
    if variant.text("access") != "generic" and not problem.whole_chunks(chunk):
        return f"rows are not made of whole chunks of {chunk} {problem.dtype} in aligned memory"
    return streams.refuses(variant, problem) if streams.is_streamed(variant) else None


def _time_last_tile(variant: Variant) -> int:
    if streams.is_streamed(variant):
        return streams.times(variant)
    chunk = 16 // ITEM_SIZE[variant.text("dtype")]
    return variant.number("warps") * variant.number("steps") * 32 * chunk


def _walk_cost(variant: Variant, problem: LinearScanProblem, tile: int) -> float:
    """The largest tile, provided that a row fills half as many of them as the tile has warps.

    The more warps meet at a tile's barrier, the more tiles it takes to hide that.
    """
    generic = 0.5 if variant.text("access") == "generic" else 0.0
    steps = problem.time // max(1, problem.sequences)
    enough = steps >= tile * variant.number("warps") / 2
    return (-tile if enough else tile) + generic


def _time_last_cost(variant: Variant, problem: LinearScanProblem) -> float:
    if streams.is_streamed(variant):
        return streams.cost(variant, problem)
    return _walk_cost(variant, problem, _time_last_tile(variant))


def _time_last_launch(variant: Variant, problem: LinearScanProblem, multiprocessors: int) -> Launch:
    if streams.is_streamed(variant):
        return streams.launch(variant, problem, multiprocessors)
    rows = problem.outer * problem.batch * problem.channels
    return Launch((ceil_div(rows, variant.number("rows")), 1, 1), problem.scalars())


def _channel_last_tile(variant: Variant) -> tuple[int, int]:
    """Channels and times of a tile."""
    lanes, vector = variant.number("lanes"), variant.number("vector")
    return lanes * vector, variant.number("warps") * (32 // lanes) * variant.number("steps")


def _channel_last_cost(variant: Variant, problem: LinearScanProblem) -> float:
    if streams.is_streamed(variant):
        return streams.cost(variant, problem)
    return 0.5 if variant.text("access") == "generic" else 0.0


def _channel_last_launch(
    variant: Variant, problem: LinearScanProblem, multiprocessors: int
) -> Launch:
    if streams.is_streamed(variant):
        return streams.launch(variant, problem, multiprocessors)
    channels, times = _channel_last_tile(variant)
    columns = problem.outer * problem.batch * ceil_div(problem.channels, channels)
    tiles = ceil_div(problem.time, times)
    with_rest = 2 if ITEM_SIZE[problem.dtype] >= 4 else 1
    each = with_rest * ITEM_SIZE[_state(problem.dtype)] // 4
    words = min(tiles - 1, 2) * columns * channels * each
    return Launch((columns * tiles, 1, 1), problem.scalars(), 16 + 8 * words if tiles > 1 else 0)


def _cuda_tiles(layout: Layout, direction: Direction, dtype: str, access: str) -> list[Tile]:
    """What tuning may choose from."""
    time_last = layout == "time_last"
    streamed = streams.time_last if time_last else streams.channel_last
    if access == space.PACKED:
        return list(streamed(direction, dtype))
    held = (space.cuda_time_last if time_last else space.cuda_channel_last)(dtype, access)
    return [*held, *(streamed(direction, dtype) if access == "aligned" else ())]


def _cuda_kernel(layout: Layout, direction: Direction) -> Kernel:
    name = f"{layout}_{direction}"
    time_last = layout == "time_last"
    defaults = scans(_time_last_tiles if time_last else _channel_last_tiles)
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        source=f"{name}.cu",
        entry=f"{FAMILY_NAME}_{name}",
        parameters=parameters(direction),
        defaults=defaults,
        constants=_cuda_constants,
        warps=lambda variant: (
            variant.number("warps") * (variant.number("rows") if time_last else 1)
        ),
        accepts=_cuda_accepts,
        cost=_time_last_cost if time_last else _channel_last_cost,
        launch=_time_last_launch if time_last else _channel_last_launch,
        space=scans(
            partial(_cuda_tiles, layout, direction),
            ACCESSES if time_last else (*ACCESSES, space.PACKED),
        ),
        shared=partial(streams.shared, direction),
        **space.tuned(
            name,
            "cuda",
            defaults,
            _cuda_accepts,
            _time_last_tile if time_last else lambda variant: _channel_last_tile(variant)[1],
            lambda problem: not time_last and streams.packs(problem),
        ),
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
        defaults=reductions({"warps": 8}),
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
    defaults = scans(partial(_triton_tiles, layout))
    tiles = space.triton_time_last if layout == "time_last" else space.triton_channel_last
    return Kernel(
        **_triton_source(layout, direction),
        defaults=defaults,
        accepts=_triton_accepts,
        cost=_triton_cost,
        launch=_triton_launch,
        space=scans(tiles),
        given=frozenset({"reverse"}),
        **space.tuned(
            name, "triton", defaults, _triton_accepts, lambda variant: variant.number("times")
        ),
    )


def _triton_reduction(layout: Layout) -> Kernel:
    unit, other = REDUCTION_TILE
    return Kernel(
        **_triton_source(layout, "reduction"),
        defaults=reductions({"unit": unit, "other": other, "warps": 4}),
        accepts=_rejects_dtype,
        cost=lambda variant, problem: 0.0,
        launch=_reduction_launch,
    )


def _triton_source(layout: Layout, direction: Direction) -> dict[str, Any]:
    """What all Triton kernels say alike."""
    name = f"{layout}_{direction}"
    return {
        "family": FAMILY_NAME,
        "name": name,
        "language": "triton",
        "source": "triton_kernels.py",
        "entry": name,
        "parameters": parameters(direction),
        "constants": _triton_constants,
        "warps": lambda variant: variant.number("warps"),
        "divisible": lambda variant: _triton_divisible(variant, layout, direction),
        "elements": lambda variant: _triton_elements(variant, direction),
        # Where rests are kept: a sum's rounding error can be had only if its terms are rounded first.
        "fuses": lambda variant: ITEM_SIZE[variant.text("dtype")] < 4,
    }


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
        return tuple(
            _triton_reduction(layout)
            if direction == "reduction"
            else _triton_kernel(layout, direction)
            for layout, direction in product(LAYOUTS, DIRECTIONS)
        )
    return (
        *(
            _cuda_kernel(layout, direction)
            for layout, direction in product(LAYOUTS, DIRECTIONS[:2])
        ),
        *(_cuda_reduction(layout) for layout in LAYOUTS),
    )


FAMILY = Family(
    name=FAMILY_NAME,
    summary="x[t] = gates[t] * x[t-1] + tokens[t]",
    folder=FOLDER,
    kernels=(*_kernels("cuda"), *_kernels("triton")),
    samples=tuple(_sample(*each) for each in product(LAYOUTS, DIRECTIONS, DTYPES, ACCESSES)),
)

for _kernel in FAMILY.kernels:
    _ = _kernel.by_text  # while importing: a first call has no time to print variants
