"""What the linear_scan family is made of: kernels, variants, what each accepts and how it launches.

Sources: ``time_last_*.cu`` and ``channel_last_*.cu`` with their ``.cuh`` headers, and
``triton_kernels.py``. The order of ``PARAMETERS`` is the order of every entry point's signature.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TypeAlias

from scan_registry.kernels.linear_scan.problem import (
    STRIDED,
    Direction,
    Layout,
    LinearScanProblem,
    Strides,
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
ACCESSES = ("aligned", "generic")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
LAYOUTS: tuple[Layout, ...] = ("time_last", "channel_last")

#: Static parameters beside dtype and access, by access.
Tiles: TypeAlias = dict[str, tuple[dict[str, Static], ...]]

_POINTERS = {
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
}


def parameters(direction: Direction) -> tuple[Parameter, ...]:
    """The signature shared by all kernels of one direction."""
    pointers = [Parameter(name, "pointer") for name in _POINTERS[direction]]
    strides = (
        Parameter(f"{tensor}_{dimension}", "i64")
        for tensor in STRIDED[direction]
        for dimension in ("batch", "channel", "time")
    )
    sizes = [Parameter(name, "i64") for name in ("batch", "channels", "time")]
    return (*pointers, *sizes, *strides, Parameter("flags", "i64"))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _variants(kernel: str, language: Language, tiles: Tiles) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            FAMILY_NAME, kernel, language, (("dtype", dtype), ("access", access), *tile.items())
        )
        for dtype, access in product(DTYPES, ACCESSES)
        for tile in tiles[access]
    )


def _rejects_static(variant: Variant, problem: LinearScanProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    return None


# --- CUDA -------------------------------------------------------------------------------------

#: Tiles of the time-last kernels: warps that share a row, rows per block, chunks a lane holds.
TIME_LAST_TILES: Tiles = {
    "aligned": (
        {"warps": 1, "rows": 4, "steps": 1},
        {"warps": 2, "rows": 1, "steps": 2},
        {"warps": 4, "rows": 1, "steps": 2},
        {"warps": 8, "rows": 1, "steps": 2},
    ),
    "generic": (
        {"warps": 1, "rows": 4, "steps": 1},
        {"warps": 4, "rows": 1, "steps": 2},
    ),
}

#: Tiles of the channel-last kernels: warps per block, threads along the channels, channels and rows
#: per thread. Either way a tile is 32 channels wide, so that many of them run side by side.
CHANNEL_LAST_TILES: Tiles = {
    "aligned": ({"warps": 4, "lanes": 8, "vector": 4, "steps": 8},),
    "generic": ({"warps": 8, "lanes": 32, "vector": 1, "steps": 8},),
}


def _cuda_constants(variant: Variant) -> dict[str, Static]:
    tile = {name.upper(): value for name, value in variant.statics if isinstance(value, int)}
    return {
        "ELEMENT": variant.text("dtype"),
        "ALIGNED": int(variant.text("access") == "aligned"),
        **tile,
    }


def _cuda_accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    if reason := _rejects_static(variant, problem):
        return reason
    chunk = problem.chunk() if problem.layout == "time_last" else variant.number("vector")
    if variant.text("access") == "aligned" and not problem.whole_chunks(chunk):
        return f"rows are not made of whole chunks of {chunk} {problem.dtype} in aligned memory"
    return None


def _time_last_tile(variant: Variant) -> int:
    chunk = 16 // ITEM_SIZE[variant.text("dtype")]
    return variant.number("warps") * variant.number("steps") * 32 * chunk


def _walk_cost(variant: Variant, problem: LinearScanProblem, tile: int) -> float:
    """The largest tile, provided that a row fills half as many of them as the tile has warps.

    The more warps meet at a tile's barrier, the more tiles it takes to hide that.
    """
    generic = 0.5 if variant.text("access") == "generic" else 0.0
    enough = problem.time >= tile * variant.number("warps") / 2
    return (-tile if enough else tile) + generic


def _time_last_cost(variant: Variant, problem: LinearScanProblem) -> float:
    return _walk_cost(variant, problem, _time_last_tile(variant))


def _time_last_launch(variant: Variant, problem: LinearScanProblem) -> Launch:
    blocks = _ceil_div(problem.batch * problem.channels, variant.number("rows"))
    return Launch((blocks, 1, 1), problem.scalars())


def _channel_last_tile(variant: Variant) -> tuple[int, int]:
    """Channels and times of a tile."""
    lanes, vector = variant.number("lanes"), variant.number("vector")
    return lanes * vector, variant.number("warps") * (32 // lanes) * variant.number("steps")


def _channel_last_cost(variant: Variant, problem: LinearScanProblem) -> float:
    return 0.5 if variant.text("access") == "generic" else 0.0


def _channel_last_launch(variant: Variant, problem: LinearScanProblem) -> Launch:
    channels, times = _channel_last_tile(variant)
    columns = problem.batch * _ceil_div(problem.channels, channels)
    tiles = _ceil_div(problem.time, times)
    words = columns * channels * (tiles - 1)
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
        variants=_variants(name, "cuda", TIME_LAST_TILES if time_last else CHANNEL_LAST_TILES),
        constants=_cuda_constants,
        warps=lambda variant: (
            variant.number("warps") * (variant.number("rows") if time_last else 1)
        ),
        accepts=_cuda_accepts,
        cost=_time_last_cost if time_last else _channel_last_cost,
        launch=_time_last_launch if time_last else _channel_last_launch,
    )


# --- Triton -----------------------------------------------------------------------------------

#: Tiles of the Triton kernels: rows and times per step of a program's walk along time.
TRITON_TILES: dict[Layout, tuple[dict[str, Static], ...]] = {
    "time_last": (
        {"rows": 1, "times": 256, "warps": 1},
        {"rows": 1, "times": 1024, "warps": 4},
    ),
    "channel_last": ({"channels": 32, "times": 16, "warps": 2},),
}


def _triton_constants(variant: Variant) -> dict[str, Static]:
    return {
        name.upper(): value
        for name, value in variant.statics
        if isinstance(value, int) and name != "warps"
    }


def _triton_divisible(variant: Variant, layout: Layout, direction: Direction) -> frozenset[str]:
    """In the aligned variants: the sequences, their rows' length and the strides between rows."""
    if variant.text("access") != "aligned":
        return frozenset()
    across = ("batch", "channel") if layout == "time_last" else ("batch", "time")
    strides = {f"{tensor}_{dim}" for tensor in STRIDED[direction] for dim in across}
    row = "time" if layout == "time_last" else "channels"
    outputs = ("gates_grad", "tokens_grad") if direction == "backward" else ()
    sequences = {name for name in STRIDED[direction] if name != "grads"}
    return frozenset({*sequences, *outputs, *strides, row})


def _triton_accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    if reason := _rejects_static(variant, problem):
        return reason
    if variant.text("access") == "aligned" and not problem.whole_chunks(16):
        return "row length and strides are not multiples of 16 elements"
    return None


def _triton_cost(variant: Variant, problem: LinearScanProblem) -> float:
    return _walk_cost(variant, problem, variant.number("times"))


def _triton_launch(variant: Variant, problem: LinearScanProblem) -> Launch:
    if problem.layout == "time_last":
        programs = _ceil_div(problem.batch * problem.channels, variant.number("rows"))
    else:
        programs = problem.batch * _ceil_div(problem.channels, variant.number("channels"))
    return Launch((programs, 1, 1), problem.scalars())


def _triton_kernel(layout: Layout, direction: Direction) -> Kernel:
    name = f"{layout}_{direction}"
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="triton",
        source="triton_kernels.py",
        entry=name,
        parameters=parameters(direction),
        variants=_variants(name, "triton", dict.fromkeys(ACCESSES, TRITON_TILES[layout])),
        constants=_triton_constants,
        warps=lambda variant: variant.number("warps"),
        accepts=_triton_accepts,
        cost=_triton_cost,
        launch=_triton_launch,
        divisible=lambda variant: _triton_divisible(variant, layout, direction),
    )


def _sample(layout: Layout, direction: Direction, dtype: str, access: str) -> Sample:
    batch, channels, time = (8, 1024, 2048) if access == "aligned" else (8, 1021, 2039)
    strides = (
        Strides(channels * time, time, 1)
        if layout == "time_last"
        else Strides(channels * time, 1, channels)
    )
    problem = LinearScanProblem(
        direction=direction,
        layout=layout,
        dtype=dtype,
        batch=batch,
        channels=channels,
        time=time,
        strides=(strides,) * len(STRIDED[direction]),
        alignment=16 if access == "aligned" else ITEM_SIZE[dtype],
    )
    return Sample(problem, dtype, access)


FAMILY = Family(
    name=FAMILY_NAME,
    summary="x[t] = gates[t] * x[t-1] + tokens[t]",
    folder=Path(__file__).parent,
    kernels=tuple(
        build(layout, direction)
        for build in (_cuda_kernel, _triton_kernel)
        for layout, direction in product(LAYOUTS, DIRECTIONS)
    ),
    samples=tuple(_sample(*each) for each in product(LAYOUTS, DIRECTIONS, DTYPES, ACCESSES)),
)
