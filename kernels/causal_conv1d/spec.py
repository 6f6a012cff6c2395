"""What the causal_conv1d family is made of: kernels, variants, what each accepts and how it launches.

Access ``aligned`` takes rows of whole chunks on their boundaries, one sequence for each batch and up to 4 taps; ``generic``
takes all, of one element a lane. The width, a run-time argument, says how many taps there are.
"""

from __future__ import annotations

from functools import partial
from itertools import product, starmap
from pathlib import Path

from scan_registry.kernels import model
from scan_registry.kernels.causal_conv1d.problem import (
    DTYPES,
    MOST_TIME,
    STRIDED,
    WARPS,
    WIDTHS,
    ConvProblem,
    Cut,
    Direction,
    Layout,
    ReductionProblem,
    Strides,
    UpdateProblem,
    ceil_div,
)

FAMILY_NAME = "causal_conv1d"
FOLDER = Path(__file__).parent
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
LAYOUTS: tuple[Layout, ...] = ("time_last", "channel_last")

_INPUTS = ("x", "weight", "bias", "initial_state", "seq_idx", "cu_seqlens")
_POINTERS: dict[Direction, tuple[str, ...]] = {
    "forward": (*_INPUTS, "y", "final_state"),
    "backward": (
        *_INPUTS,
        "y_grad",
        "final_state_grad",
        "x_grad",
        "initial_state_grad",
        "partials",
    ),
}
_DIMENSIONS = ("batch", "channel", "time")
_REDUCTION_WARPS = 8
_MOST_ACROSS = 65_535  # CTAs of a grid in its second dimension
_FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2}


def _signature(pointers: tuple[str, ...], integers: tuple[str, ...]) -> tuple[model.Parameter, ...]:
    return (
        *(model.Parameter(name, "pointer") for name in pointers),
        *(model.Parameter(name, "i64") for name in integers),
    )


def parameters(direction: Direction) -> tuple[model.Parameter, ...]:
    """The signature of both kernels of one direction."""
    strides = tuple(f"{name}_{axis}" for name, axis in product(STRIDED[direction], _DIMENSIONS))
    sizes = ("batches", "channels", "time", "width", "sequences")
    return _signature(
        _POINTERS[direction], (*sizes, *strides, "lane_bits", "steps", "pieces", "flags")
    )


# --- The convolution --------------------------------------------------------------------------


def _vector(variant: model.Variant, layout: Layout) -> int:
    """Elements that a thread holds side by side: one where rows may lie anywhere; else 16 bytes of time, or as many
    channels as registers allow, since each has a filter of its own."""
    if variant.text("access") == "generic":
        return 1
    return 16 // model.ITEM_SIZE[variant.text("dtype")] if layout == "time_last" else 4


def cut(variant: model.Variant, problem: ConvProblem) -> Cut:
    """How the variant's launch cuts the problem; a backward kernel writes sums for each of its pieces."""
    return problem.cut(_vector(variant, problem.layout))


def pieces(variant: model.Variant, problem: ConvProblem) -> int:
    """Rows of ``partials``."""
    return problem.batch * cut(variant, problem).pieces


def _constants(layout: Layout, variant: model.Variant) -> dict[str, model.Static]:
    defined: dict[str, model.Static] = {
        "ELEMENT": variant.text("dtype"),
        "TAPS": variant.number("taps"),
        "ALIGNED": int(variant.text("access") == "aligned"),
        "WARPS": WARPS,
    }
    if layout == "channel_last":
        defined["VECTOR"] = _vector(variant, layout)
        defined["DEPTH"] = _depth(variant)
    return defined


def _depth(variant: model.Variant) -> int:
    """Rows of a tensor that a thread has under way. Two tensors are read backward."""
    aligned_backward = variant.kernel.endswith("backward") and variant.text("access") == "aligned"
    return 4 if aligned_backward else 8


def _kind_mismatch(variant: model.Variant, problem: ConvProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    if variant.text("access") == "aligned" and not problem.has_one_run:
        return "a batch has several sequences"
    if problem.time > MOST_TIME:
        return f"at most {MOST_TIME} steps, not {problem.time}"
    if problem.width > variant.number("taps"):
        return f"room for {variant.number('taps')} taps, not {problem.width}"
    return None


def _accepts(layout: Layout, variant: model.Variant, problem: ConvProblem) -> str | None:
    if reason := _kind_mismatch(variant, problem):
        return reason
    vector = _vector(variant, layout)
    if variant.text("access") == "aligned" and not problem.whole_chunks(vector):
        return f"rows do not lie alike, or are not made of chunks of {vector} {problem.dtype} in aligned memory"
    return None


def _cost(variant: model.Variant, problem: ConvProblem) -> float:
    return variant.number("taps") + 16 * (variant.text("access") == "generic")


def _launch(
    layout: Layout, variant: model.Variant, problem: ConvProblem, sm_count: int
) -> model.Launch:
    pieces_of = cut(variant, problem)
    return model.Launch((pieces_of.ctas, 1, 1), problem.scalars(pieces_of))


#: Room for 4 taps where memory is read at its rate; wider filters are rare.
_KINDS: tuple[model.Pins, ...] = tuple(
    (("dtype", dtype), ("access", access), ("taps", taps))
    for dtype, (access, taps) in product(DTYPES, (("aligned", 4), ("generic", 8)))
)


def _kernel(layout: Layout, direction: Direction) -> model.Kernel:
    name = f"{layout}_{direction}"
    return model.Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        parameters=parameters(direction),
        defaults=model.Space(_KINDS, lambda kind: ((),)),
        code=model.Code(
            source=f"{name}.cu",
            entry=f"{FAMILY_NAME}_{name}",
            constants=partial(_constants, layout),
            warps=lambda variant: WARPS,
        ),
        rules=model.Rules(accepts=partial(_accepts, layout), kind_mismatch=_kind_mismatch),
        cost=_cost,
        launch=partial(_launch, layout),
    )


# --- Sums of the backward kernels -------------------------------------------------------------


def _reduction_launch(
    variant: model.Variant, problem: ReductionProblem, sm_count: int
) -> model.Launch:
    scalars = {
        "pieces": problem.pieces,
        "channels": problem.channels,
        "width": problem.width,
        "format": _FORMATS[problem.output],
    }
    return model.Launch((ceil_div((problem.width + 1) * problem.channels, 32), 1, 1), scalars)


_REDUCTION = model.Kernel(
    family=FAMILY_NAME,
    name="reduction",
    language="cuda",
    parameters=_signature(
        ("partials", "weight_grad", "bias_grad"), ("pieces", "channels", "width", "format")
    ),
    defaults=model.Space(
        ((("dtype", "float32"),),), lambda kind: ((("warps", _REDUCTION_WARPS),),)
    ),
    code=model.Code(
        source="reduction.cu",
        entry=f"{FAMILY_NAME}_reduction",
        constants=lambda variant: {"WARPS": variant.number("warps")},
        warps=lambda variant: variant.number("warps"),
    ),
    rules=model.Rules(lambda variant, problem: None),
    cost=lambda variant, problem: 0.0,
    launch=_reduction_launch,
    not_on_cpu="on the CPU no kernel of its own adds up sums",
)


# --- One step ---------------------------------------------------------------------------------


def _update_accepts(variant: model.Variant, problem: UpdateProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    most = _MOST_ACROSS * 32 * variant.number("warps")
    if problem.channels > most:
        return f"at most {most} channels, not {problem.channels}"
    return None


def _update_launch(variant: model.Variant, problem: UpdateProblem, sm_count: int) -> model.Launch:
    across = ceil_div(problem.channels, 32 * variant.number("warps") * problem.vector)
    return model.Launch((problem.sequences or problem.batch, across, 1), problem.scalars())


_UPDATE = model.Kernel(
    family=FAMILY_NAME,
    name="update",
    language="cuda",
    parameters=_signature(
        (
            *("x", "state", "weight", "bias", "positions", "indices"),
            *("destinations", "cu_seqlens", "accepted", "y"),
        ),
        (
            *("sequences", "channels", "time", "width", "slots", "length", "pad_slot"),
            *("x_batch", "x_channel", "x_time"),
            *("state_slot", "state_channel", "state_time"),
            *("y_batch", "y_channel", "y_time"),
            "flags",
        ),
    ),
    defaults=model.Space(
        tuple((("dtype", dtype),) for dtype in DTYPES), lambda kind: ((("warps", WARPS),),)
    ),
    code=model.Code(
        source="update.cu",
        entry=f"{FAMILY_NAME}_update",
        constants=lambda variant: {
            "ELEMENT": variant.text("dtype"),
            "TAPS": WIDTHS[-1],
            "ALIGNED": 0,
            "WARPS": variant.number("warps"),
        },
        warps=lambda variant: variant.number("warps"),
    ),
    rules=model.Rules(_update_accepts),
    cost=lambda variant, problem: 0.0,
    launch=_update_launch,
)


# --- The family -------------------------------------------------------------------------------


def _sample(layout: Layout, direction: Direction, dtype: str, access: str) -> model.Sample:
    batch, channels, time = (8, 2048, 2048) if access == "aligned" else (8, 2047, 2039)
    strides = (
        Strides(channels * time, time, 1)
        if layout == "time_last"
        else Strides(channels * time, 1, channels)
    )
    problem = ConvProblem(
        *(direction, layout, dtype),
        *(batch, channels, time, 4),
        strides=(strides,) * len(STRIDED[direction]),
        alignment=16 if access == "aligned" else model.ITEM_SIZE[dtype],
    )
    return model.Sample(problem, dtype, access)


def _other_samples() -> tuple[model.Sample, ...]:
    reduction: model.Problem = ReductionProblem("float32", 64, 2048, 4)
    strides = Strides(2048, 1, 2048), Strides(3 * 2048, 3, 1), Strides(2048, 1, 2048)
    updates = (UpdateProblem(dtype, 64, 2048, 1, 4, 64, 3, strides) for dtype in DTYPES)
    return (
        model.Sample(reduction, "float32", "aligned"),
        *(model.Sample(problem, problem.dtype, "aligned") for problem in updates),
    )


FAMILY = model.Family(
    name=FAMILY_NAME,
    summary="y[t] = act(bias + sum of weight[W-1-j] * x[t-j])",
    folder=FOLDER,
    kernels=(
        *(_kernel(layout, direction) for layout, direction in product(LAYOUTS, DIRECTIONS)),
        _REDUCTION,
        _UPDATE,
    ),
    samples=(
        *starmap(_sample, product(LAYOUTS, DIRECTIONS, DTYPES, ("aligned", "generic"))),
        *_other_samples(),
    ),
    on_cpu=True,
    by_torch=("float64",),
)
