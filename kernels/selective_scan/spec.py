"""What the selective_scan family is made of: kernels, variants, what each accepts and how it launches.

``forward.cu``, ``backward.cu`` and ``adjoint.cu`` have the algorithms; ``problem.py`` the tensors. Access ``aligned`` moves 16 bytes at
a time along the layout's dimension; ``generic`` takes any strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product, starmap
from pathlib import Path

from scan_registry.base.strides import stride_names
from scan_registry.hardware.target import Target
from scan_registry.kernels import model
from scan_registry.kernels.selective_scan import problem as problems
from scan_registry.kernels.selective_scan.problem import BLOCK_STATES, INTERVAL

FAMILY_NAME = "selective_scan"
FOLDER = Path(__file__).parent
ACCESSES = ("aligned", "generic")
#: Channels of a warp of the kernel ``adjoint``.
ADJOINT_CHANNELS = 8

_POINTERS: dict[problems.Direction, tuple[str, ...]] = {
    "forward": (
        *("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"),
        *("part_states", "part_sizes", "out", "final_state", "checkpoints", "cu_seqlens"),
    ),
    "adjoint": (
        "delta",
        "A",
        "C",
        "z",
        "delta_bias",
        "out_grad",
        "cu_seqlens",
        "adjoints",
        "sizes",
    ),
    "backward": (
        *("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "out_grad", "final_grad"),
        *("checkpoints", "adjoints", "sizes", "cu_seqlens"),
        *("u_grad", "delta_grad", "z_grad", "A_grad", "B_grad", "C_grad", "D_grad", "bias_grad"),
        *("initial_grad", "carries"),
    ),
}
_SIZES = ("batch", "channels", "time", "states", "group_channels", "sequences")


def parameters(direction: problems.Direction) -> tuple[model.Parameter, ...]:
    """The signature of one kernel."""
    pointers = (model.Parameter(name, "pointer") for name in _POINTERS[direction])
    integers = (*_SIZES, "parts", "flags", *stride_names(problems.STRIDED[direction]))
    return (*pointers, *(model.Parameter(name, "i64") for name in integers))


def _ctas(variant: model.Variant, problem: problems.SelectiveScanProblem) -> int:
    if variant.kernel == "backward":
        of_group = problem.ctas_of_group
    else:
        of_group = -(-problem.group_channels // _channels_of(variant))
    parts = problem.parts - (variant.kernel == "adjoint")
    return of_group * parts * problem.groups * problem.batch * max(1, problem.sequences)


def _channels_of(variant: model.Variant) -> int:
    """Of a CTA."""
    if variant.kernel == "adjoint":
        return ADJOINT_CHANNELS * variant.number("warps")
    if _takes_turns(variant):
        return problems.TURNS_CHANNELS
    split = variant.number("split") if variant.kernel == "forward" else 1
    return problems.WARP_CHANNELS * variant.number("warps") // split


def _takes_turns(variant: model.Variant) -> bool:
    """Whether the warps of a CTA take turns over time (forward_turns.cuh)."""
    return "turns" in dict(variant.statics)


def _kind_mismatch(variant: model.Variant, problem: problems.SelectiveScanProblem) -> str | None:
    if problem.constant:
        return "B or C do not change with time"
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    if variant.text("access") == "generic":
        return None
    if variant.text("layout") != problem.layout:
        return f"layout {variant.text('layout')}, not {problem.layout}"
    if not problem.aligned or problem.sequences:
        return "the sequences are packed, or do not lie in whole pieces of 16 bytes"
    whole = not _takes_turns(variant) or all(problem.whole)
    return None if whole else "B or C do not lie along time in whole pieces of 16 bytes"


def _capacity(variant: model.Variant) -> int:
    """States of a channel that there is room for; 0: any number."""
    if variant.kernel == "forward":
        return (
            4 * variant.number("states") * (1 if _takes_turns(variant) else variant.number("split"))
        )
    if variant.kernel == "backward" and variant.number("blocks") == 1:
        return 4 * variant.number("states")
    return 0


def _accepts(variant: model.Variant, problem: problems.SelectiveScanProblem) -> str | None:
    if reason := _kind_mismatch(variant, problem):
        return reason
    if problem.time >= 2**31 - INTERVAL:
        return f"{problem.time} steps; they are counted in 32 bits"
    capacity = _capacity(variant)
    if capacity and problem.states > capacity:
        return f"{problem.states} states; it has room for {capacity}"
    if variant.kernel == "adjoint":
        return None if problem.parts > 1 else "there is one part, which hands nothing on"
    if not capacity and problem.states <= BLOCK_STATES:
        return f"{problem.states} states; it is for more than {BLOCK_STATES}"
    return None


def _launch(
    variant: model.Variant, problem: problems.SelectiveScanProblem, sm_count: int
) -> model.Launch:
    known = problem.scalars()
    wanted = [p.name for p in parameters(problem.direction) if p.kind == "i64"]
    blocks = max(1, -(-problem.states // BLOCK_STATES)) if variant.kernel == "adjoint" else 1
    return model.Launch(
        (_ctas(variant, problem), blocks, 1), {name: known[name] for name in wanted}
    )


def _constants(variant: model.Variant) -> dict[str, model.Static]:
    numbers = {name.upper(): value for name, value in variant.statics if isinstance(value, int)}
    if variant.kernel != "forward":
        numbers |= {"TIMES": INTERVAL}
    return {
        "INTERVAL": INTERVAL,
        "ELEMENT": variant.text("dtype"),
        "ALIGNED": int(variant.text("access") == "aligned"),
        "CHANNEL_LAST": int(variant.text("layout") == "channel_last"),
        **numbers,
    }


# --- Forward ----------------------------------------------------------------------------------


def _forward_tiles(kind: model.Pins) -> tuple[model.Pins, ...]:
    """For up to 16 states and for any number; and in 16 bits for up to 64, and for few channels, which fill a GPU only
    if two warps share them, or, of misaligned rows as vision models have them, for up to 8. In float32 two warps always share
    them, as its gates take long and more warps hide that. And along time for so few channels that warps take turns."""
    named = dict(kind)
    wide = model.ITEM_SIZE[str(named["dtype"])] > 2
    large = (8, 8, 16, 8, 1)
    if wide:
        tiles = [(2, 2, 16, 4, 4), large]
    elif named["access"] == "aligned":
        tiles = [
            (4, 1, 16, 4, 3),
            (2, 2, 32, 4, 4),
            (2, 2, 32, 4, 3),
            (8, 2, 32, 4, 2),
            large,
        ]
    else:
        tiles = [(2, 1, 16, 4, 3), (4, 1, 16, 4, 3), large]
    names = ("states", "split", "times", "warps", "ctas")
    shared = tuple(tuple(zip(names, tile, strict=True)) for tile in tiles)
    if not _along_time(named):
        return shared
    names = ("states", "turns", "times", "warps", "ctas")
    turns = (4, 1, 32, 2, 6) if wide else (4, 1, 128, 4, 4)
    return (*shared, tuple(zip(names, turns, strict=True)))


def _serves(statics: model.Pins, target: Target) -> bool:
    """Few registers, for one CTA more on an SM, are enough for the code of sm_90 alone: forwards in 16 bits, and backwards
    of 16 states, where bfloat16 along time has both. Tiles for up to 8 states, and those whose warps take turns, are for sm_90
    alone, too: archives of others have no room for them. For many rows along time in 16 bits two warps that share channels are
    1% slower there than warps that do not, which is not worth their room."""
    named = dict(statics)
    of_sm90 = target.capability == (9, 0) and not target.is_ptx
    if "turns" in named:
        return of_sm90
    narrow = named["dtype"] != "float32"
    if (named.get("states"), named.get("split")) == (4, 1) and narrow and _along_time(named):
        return not of_sm90
    if (named.get("states"), named.get("split")) == (2, 2) and narrow:
        return (named.get("ctas") == 4) == of_sm90
    if (named.get("states"), named.get("blocks")) == (4, 1):
        both = of_sm90 and named["dtype"] == "bfloat16" and _along_time(named)
        return both or (named.get("ctas") == 3) == of_sm90
    small = named.get("states") == 2 and (named.get("split") == 1 or "blocks" in named)
    return of_sm90 or not small


def _along_time(named: Mapping[str, object]) -> bool:
    return (named["access"], named["layout"]) == ("aligned", "time_last")


def _turns_shared(variant: model.Variant) -> int:
    """Of the structure ``Shared`` in forward_turns.cuh."""
    times, channels, states = variant.number("times"), problems.TURNS_CHANNELS, BLOCK_STATES
    row, padded = model.ITEM_SIZE[variant.text("dtype")] * times, times // 32 * 36
    floats = 2 * channels * (padded | 4) + states * -(-padded // 8) * 8 + 4 * 4 + 4 * 32
    copied = row * (2 * channels + states) + 4 * 16
    return 4 * floats + 8 * variant.number("warps") + row * (channels + states) + 2 * copied


def _forward_shared(variant: model.Variant) -> int:
    if _takes_turns(variant):
        return _turns_shared(variant)
    states, times = 4 * variant.number("states") * variant.number("split"), variant.number("times")
    channels, rows = _channels_of(variant), problems.WARP_CHANNELS * variant.number("warps")
    return 4 * (channels * (2 * times + 4) + rows * (times + 4) + 4 * states * times + 2 * channels)


def _forward_cost(variant: model.Variant, problem: problems.SelectiveScanProblem) -> float:
    """Room for states that there are not; then whether warps take turns; then generic access where there is another; then whether
    two warps share their channels, which pays where there are few: on an H100 up to 24,576 of all batches and sequences."""
    if _takes_turns(variant):
        return _capacity(variant) + (-1 if problem.takes_turns else 1) / 16
    rows = problem.batch * problem.channels * max(1, problem.sequences)
    split = 1 if rows > 24_576 else 2
    generic = variant.text("access") == "generic"
    return _capacity(variant) + generic / 32 + abs(variant.number("split") - split) / 64


# --- Backward ---------------------------------------------------------------------------------


def _backward_tiles(kind: model.Pins) -> tuple[model.Pins, ...]:
    """For up to 16 states, which are one block, and for any number; and in 16 bits, of misaligned rows as vision models
    have them, for up to 8."""
    tiles = [
        (4, problems.WARPS_OF_ONE, 1, 3),
        (4, problems.WARPS_OF_ONE, 1, 2),
        (4, problems.WARPS_OF_SEVERAL, 2, 4),
    ]
    named = dict(kind)
    if named["access"] == "generic" and model.ITEM_SIZE[str(named["dtype"])] == 2:
        tiles.append((2, problems.WARPS_OF_ONE, 1, 3))
    names = ("states", "warps", "blocks", "ctas")
    return tuple(tuple(zip(names, tile, strict=True)) for tile in tiles)


def _backward_shared(variant: model.Variant) -> int:
    warps, times = variant.number("warps"), INTERVAL
    channels = warps * problems.WARP_CHANNELS
    rows = channels * (4 * times + times // 2 + 2)
    states = variant.number("states")
    of_states, stage = states // 2 * 32 * warps * times, 2 * 4 * states * times
    sums = 0 if variant.number("blocks") == 1 else 3 * channels * (times + 1)
    return 4 * (rows + of_states + stage + 4 * channels + sums)


def _backward_cost(variant: model.Variant, problem: problems.SelectiveScanProblem) -> float:
    """Room for states that there are not; then whether a kernel has more registers than three CTAs on an SM leave it, which
    pays where no SM of an H100 gets more than two."""
    ctas = 2 if _ctas(variant, problem) <= 2 * 132 else 3
    states = variant.number("blocks") * variant.number("states")
    return states + abs(variant.number("ctas") - ctas) / 16


def _adjoint_tiles(kind: model.Pins) -> tuple[model.Pins, ...]:
    return ((("warps", 4),),)


def _adjoint_shared(variant: model.Variant) -> int:
    channels = _channels_of(variant)
    return 4 * (channels * (2 * INTERVAL + 4) + 2 * 2 * BLOCK_STATES * INTERVAL + channels)


# --- The family -------------------------------------------------------------------------------

#: Generic access goes along time, whatever the layout.
_KINDS: tuple[model.Pins, ...] = tuple(
    (("dtype", dtype), ("layout", layout), ("access", access))
    for dtype, (layout, access) in product(
        problems.DTYPES, (*product(problems.LAYOUTS, ("aligned",)), ("time_last", "generic"))
    )
)


_TILES: dict[problems.Direction, Callable[[model.Pins], tuple[model.Pins, ...]]] = {
    "forward": _forward_tiles,
    "adjoint": _adjoint_tiles,
    "backward": _backward_tiles,
}
_SHARED: dict[problems.Direction, Callable[[model.Variant], int]] = {
    "forward": _forward_shared,
    "adjoint": _adjoint_shared,
    "backward": _backward_shared,
}
_COST: dict[problems.Direction, Callable[[model.Variant, problems.SelectiveScanProblem], float]] = {
    "forward": _forward_cost,
    "adjoint": lambda variant, problem: 0.0,
    "backward": _backward_cost,
}


def _may_spill(direction: problems.Direction) -> dict[model.Variant, int]:
    """float32 with more than 16 states: forwards up to 40 bytes, of a lane that has 8 states of two channels; backwards on
    sm_120 up to 32. And backwards of 16 states in 16 bits, with three CTAs on an SM: up to 32 bytes once a tile, none in its
    steps (notes/README.md)."""
    spilling = {
        "forward": (("float32", {("states", 8)}),),
        "backward": (
            ("float32", {("blocks", 2)}),
            ("bfloat16", {("states", 4), ("ctas", 3)}),
            ("float16", {("states", 4), ("ctas", 3)}),
        ),
        "adjoint": (),
    }[direction]
    return {
        model.Variant(FAMILY_NAME, direction, "cuda", (*kind, *tile)): 40
        for kind in _KINDS
        for tile in _TILES[direction](kind)
        if any(dict(kind)["dtype"] == dtype and pins <= set(tile) for dtype, pins in spilling)
    }


def _kernel(direction: problems.Direction) -> model.Kernel:
    return model.Kernel(
        family=FAMILY_NAME,
        name=direction,
        language="cuda",
        parameters=parameters(direction),
        defaults=model.Space(_KINDS, _TILES[direction]),
        code=model.Code(
            source=f"{direction}.cu",
            entry=f"{FAMILY_NAME}_{direction}",
            constants=_constants,
            warps=lambda variant: variant.number("warps"),
            shared=_SHARED[direction],
            may_spill=_may_spill(direction),
        ),
        rules=model.Rules(_accepts, kind_mismatch=_kind_mismatch, serves=_serves),
        cost=_COST[direction],
        launch=_launch,
        not_on_cpu="on the CPU no sequence is cut into parts" if direction == "adjoint" else None,
    )


def _sample(direction: problems.Direction, dtype: str, layout: str, access: str) -> model.Sample:
    batch, channels, time, states = (
        (4, 1536, 2048, 16) if access == "aligned" else (4, 1531, 2039, 16)
    )
    of_row = {"batch": channels * time, "channel": time, "time": 1}
    if layout == "channel_last":
        of_row |= {"channel": 1, "time": channels}
    of_projection = {"batch": states * time, "group": states * time, "state": time, "time": 1}
    strides = [
        (of_projection if tensor in "BC" else of_row)[dimension]
        for tensor, dimensions in problems.STRIDED[direction].items()
        for dimension in dimensions
    ]
    problem = problems.SelectiveScanProblem(
        *(direction, dtype, layout),  # type: ignore[arg-type]
        *(batch, channels, time, states, 1),
        strides=tuple(strides),
        softplus=True,
        aligned=access == "aligned",
        whole=(access == "aligned",) * 2,
        parts=2 if direction == "adjoint" else 1,
    )
    return model.Sample(problem, dtype, access)


FAMILY = model.Family(
    name=FAMILY_NAME,
    summary="h[t] = exp(delta * A) * h[t-1] + delta * B[t] * u[t]; out = C . h, gated",
    folder=FOLDER,
    kernels=tuple(map(_kernel, problems.DIRECTIONS)),
    samples=tuple(
        starmap(_sample, product(problems.DIRECTIONS, problems.DTYPES, problems.LAYOUTS, ACCESSES))
    ),
    on_cpu=True,
    by_torch=("float64",),
)
