"""What the selective_state_update family is made of: a kernel of one token, one of what servers add, and how they launch.

Access ``aligned`` moves 16 bytes of a channel's states at a time, and ``tied`` does where A is one number for all of these,
as in Mamba-2; ``dense``, of two further kernels, takes rows of 16 states without gaps, as in Mamba; ``generic``, of the kernel that
servers have, takes any strides, dtypes and number of states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product, starmap
from pathlib import Path

from scan_registry.kernels import model
from scan_registry.kernels.selective_state_update.problem import (
    DENSE_DTYPES,
    DENSE_INPUTS,
    DENSE_STATES,
    DIMENSIONS,
    DTYPES,
    FORMATTED,
    STRIDES,
    StepProblem,
)

FAMILY_NAME = "selective_state_update"
ACCESSES = ("aligned", "tied", "generic", "dense")
_WARPS = 4
_POINTERS = (
    *("state", "x", "dt", "A", "B", "C", "D", "z", "bias", "indices"),
    *("dst_state", "dst_indices", "seed", "cu_seqlens", "num_accepted", "out"),
)
_SIZES = ("batches", "heads", "channels", "states", "group_rows", "slots")
_OF_SEQUENCES = ("dst_slots", "pad_slot", "tokens", "columns")
_OF_LAUNCH = ("lane_bits", "steps", "formats", "flags")
#: The strides that a kernel of one token has.
_STRIDES = STRIDES[: STRIDES.index("indices_batch") + 1]
#: Sizes and strides that the dense kernels have.
_OF_DENSE_STEP = (
    *("batches", "channels", "slots", "formats", "flags", "state_slot"),
    *(f"{name}_batch" for name in ("x", "dt", "z", "out", "B", "C")),
    *("D_channel", "bias_channel", "indices_batch"),
)
_OF_DENSE_TOKENS = (
    *_OF_DENSE_STEP,
    *_OF_SEQUENCES,
    *STRIDES[STRIDES.index("indices_token") :],
)
#: Batches of a thread: at most, if all CTAs run at once then; and where that would take more, since the last of a few waves of long
#: CTAs may be nearly empty.
_MOST_STEPS, _SOME_STEPS = 32, 8
_MOST_ACROSS = 65_535  # CTAs of a grid in its second and third dimension


def _accepts(variant: model.Variant, problem: StepProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"a state of {variant.text('dtype')}, not {problem.dtype}"
    if variant.text("access") != "generic" and (reason := _misaligned(variant, problem)):
        return reason
    counted = (
        problem.rows,
        problem.batch,
        problem.rows_of_inputs,
        problem.slots,
        problem.dst_slots or 0,
    )
    if max(counted) >= 2**31:
        return f"{max(counted)} channels of all heads, batches, tokens or slots; it counts them in 31 bits"
    if problem.sections > _MOST_ACROSS:
        return f"{problem.sections} heads or groups; at most {_MOST_ACROSS}"
    return None


def _misaligned(variant: model.Variant, problem: StepProblem) -> str | None:
    """Why a kernel that reads 16 bytes at a time, in static dtypes, does not take the problem."""
    inputs = variant.text("inputs")
    if not problem.aligned or problem.large:
        return (
            "states do not lie in whole chunks of 16 bytes in aligned memory, or tensors are large"
        )
    if (variant.text("access") == "tied") != problem.tied:
        return f"A has {'one number' if problem.tied else 'several numbers'} for each channel"
    if problem.inputs != inputs or not (problem.tied or problem.decay == "float32"):
        return f"for x, dt, B, C and z of {inputs}, and for A of float32"
    return None


def _accepts_tokens(variant: model.Variant, problem: StepProblem) -> str | None:
    if reason := _accepts(variant, problem):
        return reason
    most = 32 * _vector(variant) * variant.number("chunks")
    if problem.states > most:
        return f"{problem.states} states; a warp has {most} of a row"
    return None


def _accepts_dense(variant: model.Variant, problem: StepProblem) -> str | None:
    if reason := _accepts(variant, problem):
        return reason
    return (
        None if problem.dense else f"rows of {DENSE_STATES} states and all tensors lie without gaps"
    )


def _vector(variant: model.Variant) -> int:
    """States of a chunk."""
    return (
        1 if variant.text("access") == "generic" else 16 // model.ITEM_SIZE[variant.text("dtype")]
    )


def _lane_bits(variant: model.Variant, problem: StepProblem) -> int:
    chunks_of_lane = dict(variant.statics).get("chunks", 1)
    assert isinstance(chunks_of_lane, int)
    chunks = -(-problem.states // (_vector(variant) * chunks_of_lane))
    return min(5, (chunks - 1).bit_length())


def _launch(variant: model.Variant, problem: StepProblem, sm_count: int) -> model.Launch:
    """As many CTAs as run at once, if they have few enough batches then, or else waves of them."""
    rows, warps = variant.number("rows"), variant.number("warps")
    lane_bits = _lane_bits(variant, problem)
    if variant.text("access") != "dense":
        lane_bits = max(lane_bits, rows.bit_length() - 1)  # a lane computes for one row of the warp
    sections = problem.sections
    ctas = -(-(problem.rows // sections) // (rows * warps * (32 >> lane_bits)))
    slices = max(1, sm_count * variant.number("ctas") // (ctas * sections))
    steps = -(-problem.batch // slices)
    if steps > _MOST_STEPS:
        steps = max(_SOME_STEPS, -(-problem.batch // _MOST_ACROSS))
    scalars = {**problem.scalars(), "lane_bits": lane_bits, "steps": steps}
    return model.Launch((ctas, sections, -(-problem.batch // steps)), scalars)


def _constants(variant: model.Variant) -> dict[str, model.Static]:
    access = variant.text("access")
    return {
        "ELEMENT": variant.text("dtype"),
        "INPUTS": str(dict(variant.statics).get("inputs", "float32")),
        "ALIGNED": int(access != "generic"),
        "TIED": int(access == "tied"),
        **{name.upper(): number for name, number in variant.statics if isinstance(number, int)},
    }


def _kinds() -> Iterator[model.Pins]:
    """A state of 16 bits usually has inputs like itself; others are left to the generic kernel of several tokens."""
    for dtype in DTYPES:
        for access in ACCESSES[:2]:
            for inputs in DTYPES if dtype == "float32" else (dtype,):
                yield ("dtype", dtype), ("access", access), ("inputs", inputs)


def _tiles(kind: model.Pins) -> tuple[model.Pins, ...]:
    """Rows of a lane, and CTAs that an SM is to have room for: as many as there are registers for."""
    pins = dict(kind)
    tied, narrow = pins["access"] == "tied", model.ITEM_SIZE[str(pins["dtype"])] == 2
    rows, ctas = (4, 4 if narrow else 5) if tied else (2, 5) if narrow else (4, 4)
    return ((("rows", rows), ("warps", _WARPS), ("ctas", ctas)),)


def _kinds_of_tokens() -> Iterator[model.Pins]:
    """Rows of one gate, of states of float32 and bfloat16 with inputs of bfloat16; others are left to the generic kernel."""
    for kind in _kinds():
        if {("access", "tied"), ("inputs", "bfloat16")} <= {*kind}:
            yield kind
    for dtype in DTYPES:
        yield ("dtype", dtype), ("access", "generic")


def _tiles_of_tokens(kind: model.Pins) -> tuple[model.Pins, ...]:
    """Rows and chunks of a thread, and CTAs as above."""
    if ("access", "generic") in kind:
        return ((("rows", 1), ("chunks", 8), ("warps", _WARPS), ("ctas", 3)),)
    return ((("rows", 4), ("chunks", 1), ("warps", _WARPS), ("ctas", 4)),)


def _kinds_of_dense() -> Iterator[model.Pins]:
    for dtype in DENSE_DTYPES:
        yield ("dtype", dtype), ("access", "dense"), ("inputs", DENSE_INPUTS)


def _tiles_of_dense(kind: model.Pins) -> tuple[model.Pins, ...]:
    return ((("rows", 4), ("warps", _WARPS), ("ctas", 4)),)


def _may_spill(
    name: str,
    kinds: Iterable[model.Pins],
    tiles: Callable[[model.Pins], tuple[model.Pins, ...]],
) -> dict[model.Variant, int]:
    """Variants of these kinds: up to 112 bytes, of dense states on sm_80 to sm_89."""
    return {
        model.Variant(FAMILY_NAME, name, "cuda", (*kind, *tile)): 112
        for kind in kinds
        for tile in tiles(kind)
    }


def _parameters(sizes: tuple[str, ...]) -> tuple[model.Parameter, ...]:
    return (
        *(model.Parameter(name, "pointer") for name in _POINTERS),
        *(model.Parameter(name, "i64") for name in sizes),
    )


def _cost_of_access(variant: model.Variant, problem: StepProblem) -> bool:
    return variant.text("access") == "generic"


_STEP = model.Kernel(
    family=FAMILY_NAME,
    name="step",
    language="cuda",
    parameters=_parameters((*_SIZES, *_OF_LAUNCH, *_STRIDES)),
    defaults=model.Space(tuple(_kinds()), _tiles),
    code=model.Code(source="step.cu", entry=FAMILY_NAME, constants=_constants),
    rules=model.Rules(_accepts),
    cost=_cost_of_access,
    launch=_launch,
)
_TOKENS = model.Kernel(
    family=FAMILY_NAME,
    name="tokens",
    language="cuda",
    parameters=_parameters((*_SIZES, *_OF_SEQUENCES, *_OF_LAUNCH, *STRIDES)),
    defaults=model.Space(tuple(_kinds_of_tokens()), _tiles_of_tokens),
    code=model.Code(
        source="tokens.cu",
        entry=f"{FAMILY_NAME}_tokens",
        constants=_constants,
        # On sm_80 to sm_89 up to 40 bytes a thread.
        may_spill=_may_spill(
            "tokens",
            (kind for kind in _kinds_of_tokens() if ("access", "tied") in kind),
            _tiles_of_tokens,
        ),
    ),
    rules=model.Rules(_accepts_tokens),
    cost=_cost_of_access,
    launch=_launch,
)


_DENSE_STEP, _DENSE_TOKENS = (
    model.Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        parameters=_parameters(scalars),
        defaults=model.Space(tuple(_kinds_of_dense()), _tiles_of_dense),
        code=model.Code(
            source=f"{name}.cu",
            entry=f"{FAMILY_NAME}_{name}",
            constants=_constants,
            # A step on sm_100 and sm_120 up to 16 bytes a thread, and several tokens on sm_80 to sm_89 up to 96.
            may_spill=_may_spill(name, _kinds_of_dense(), _tiles_of_dense),
        ),
        rules=model.Rules(_accepts_dense),
        cost=_cost_of_access,
        launch=_launch,
    )
    for name, scalars in (
        ("dense_step", _OF_DENSE_STEP),
        ("dense_tokens", _OF_DENSE_TOKENS),
    )
)


def _sample(dtype: str, access: str, served: bool) -> model.Sample:
    """Of one token of each sequence; or of four, as servers verify drafts, with inputs of 16 bits."""
    inputs = DENSE_INPUTS if access == "dense" or (served and dtype == "float32") else dtype
    batch, channels, states = (64, 5120, 15) if access == "generic" else (64, 5120, 16)
    of_row = {"batch": channels, "head": 0, "channel": 1}
    of_projection = {"batch": states, "group": states, "state": 1}
    sizes: dict[str, dict[str, int]] = {
        "state": {"slot": channels * states, "head": 0, "channel": states, "state": 1},
        **dict.fromkeys(("x", "dt", "z", "out", "D", "bias"), of_row),
        "A": {"head": 0, "channel": states, "state": 1},
        **dict.fromkeys(("B", "C"), of_projection),
        **dict.fromkeys(("indices", "dst_indices"), dict.fromkeys(("batch", "token"), 0)),
        "dst_state": {"slot": channels * states},
    }
    problem = StepProblem(
        dtype=dtype,
        batch=batch,
        heads=1,
        channels=channels,
        states=states,
        groups=1,
        slots=batch,
        dtypes=tuple("float32" if name in ("A", "D") else inputs for name in FORMATTED),
        strides=tuple(sizes[name][axis] for name, axes in DIMENSIONS.items() for axis in axes),
        softplus=True,
        aligned=access != "generic",
        in_pieces=access == "dense",
        served=served,
        tokens=4 * batch if served else None,
    )
    return model.Sample(problem, dtype, access)


FAMILY = model.Family(
    name=FAMILY_NAME,
    summary="state = exp(dt * A) * state + dt * B * x; out = C . state, gated, for one step or a few",
    folder=Path(__file__).parent,
    kernels=(_STEP, _TOKENS, _DENSE_STEP, _DENSE_TOKENS),
    samples=(
        *starmap(_sample, product(DTYPES, ("aligned", "generic"), (False,))),
        *starmap(_sample, product(DTYPES, ("generic",), (True,))),
        *starmap(_sample, product(DENSE_DTYPES, ("dense",), (False, True))),
    ),
)
