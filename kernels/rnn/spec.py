"""What the rnn family is made of: kernels, variants, what each accepts and how it launches.

``sequence_*`` compute all steps in one persistent launch, with R in registers and shared memory;
``step_*`` what comes after, or before, the product with R in one step. Sources have the same names;
those of Triton, for small heads, are in ``triton_kernels.py``.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

from scan_registry.hardware.target import Target
from scan_registry.kernels.model import (
    ITEM_SIZE,
    Code,
    Family,
    Kernel,
    Launch,
    Parameter,
    Pins,
    Rules,
    Sample,
    Space,
    Static,
    Tunable,
    Variant,
)
from scan_registry.kernels.rnn import tilings
from scan_registry.kernels.rnn.constraints import first_broken
from scan_registry.kernels.rnn.problem import (
    DTYPES,
    SIZES,
    STRIDED,
    Direction,
    RnnProblem,
    Scope,
    stride_names,
)

FAMILY_NAME = "rnn"
FOLDER = Path(__file__).parent

_POINTERS: dict[tuple[Scope, Direction], tuple[str, ...]] = {
    ("sequence", "forward"): (
        "inputs",
        "recurrent",
        "bias",
        "initial",
        "reset",
        "reset_states",
        "states",
        "cache",
        "workspace",
    ),
    ("sequence", "backward"): (
        "recurrent",
        "states",
        "initial",
        "reset",
        "reset_states",
        "cache",
        "states_grad",
        "final_grad",
        "gates_grad",
        "initial_grad",
        "reset_grad",
        "workspace",
    ),
    ("step", "forward"): ("inputs", "terms", "bias", "carry", "states", "cache"),
    ("step", "backward"): (
        "terms",
        "before",
        "states",
        "cache",
        "states_grad",
        "carry",
        "gates_grad",
    ),
}
_STEP_WARPS = 4


def _pointers(scope: Scope, direction: Direction, language: str) -> tuple[str, ...]:
    """Those of one kernel. Triton's have no resets: what sLSTM's gradients keep fills the registers as it is."""
    names = _POINTERS[scope, direction]
    return names if language == "cuda" else tuple(n for n in names if not n.startswith("reset"))


def parameters(scope: Scope, direction: Direction, language: str = "cuda") -> tuple[Parameter, ...]:
    """The signature of one kernel."""
    pointers = [Parameter(name, "pointer") for name in _pointers(scope, direction, language)]
    sizes = ["batch", *(["time"] if scope == "sequence" else []), "heads", "dim"]
    options = ["forward_clip"] if direction == "forward" else ["graded", "recurrent_clip"]
    names = (*sizes, *options, *stride_names(scope, direction))
    return (*pointers, *(Parameter(name, "i64") for name in names))


def _launch_of(
    scope: Scope, direction: Direction, problem: RnnProblem, blocks: int, workspace: int = 0
) -> Launch:
    known = problem.scalars()
    wanted = [each.name for each in parameters(scope, direction) if each.kind == "i64"]
    return Launch((blocks, 1, 1), {name: known[name] for name in wanted}, workspace)


def _rejects_kind(variant: Variant, problem: RnnProblem) -> str | None:
    """Why a variant is for something else; anything that its pairs and words cannot be read from."""
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    if variant.text("function") != problem.function:
        return f"function {variant.text('function')}, not {problem.function}"
    if problem.alignment < 16:
        return f"tensors are aligned to {problem.alignment} bytes; it takes 16"
    return None


# --- All steps --------------------------------------------------------------------------------


def _values(variant: Variant, direction: Direction) -> dict[str, int]:
    """A variant's tiling and kind, by the constraints' names."""
    given = {name: value for name, value in variant.statics if isinstance(value, int)}
    gates = SIZES[variant.text("function")].recurrent  # type: ignore[index]
    item = ITEM_SIZE[variant.text("dtype")]
    return {**given, "gates": gates, "item": item, "backward": int(direction == "backward")}


def _fused_tilings(kind: Pins, direction: Direction) -> tuple[Pins, ...]:
    """Up to some hundred units, a block has 64 of them and few warps share a row of R, so that few blocks
    have to wait for each other; else 16 of them, with as much of R as there is room for. A block may also
    have a head of up to 64 units for itself and, forwards, a cluster one of up to 256."""
    function, dtype = (str(value) for _, value in kind[:2][::-1])
    gates, narrow = SIZES[function].recurrent, ITEM_SIZE[dtype] == 2  # type: ignore[index]
    # sLSTM's other states, LSTM's gradients and float32 that is split into parts take registers, too.
    crowded = function == "slstm" or (function == "lstm" and direction == "backward" and narrow)
    chunks = (12 if crowded else 16) // gates
    few = chunks if narrow else 12 // gates
    deep = {"chunks": chunks, "layers": 8 // gates}
    if function == "elman" and narrow:
        deep = {"chunks": 8}  # for 2048 units, which have about as many SMs as there are
    found = [
        _tiling(rows=4, split=2, chunks=few, layers=4 // gates),
        _tiling(rows=1, split=8, **deep),
    ]
    if direction == "forward":
        found.append(_tiling(rows=4, split=2, chunks=2 if narrow else 4, cluster=1))
    if narrow and direction == "forward":
        found.append(_tiling(rows=2, split=2, chunks=8, cluster=8))
    elif narrow:
        found.append(_tiling(rows=4, split=2, chunks=1, cluster=1))
    return tuple(found)


def _tiling(**given: int) -> Pins:
    return tuple(
        (name, {"batches": 1, "layers": 0, "cluster": 0, **given}[name]) for name in tilings.DOMAINS
    )


def _fused_space(kind: Pins, direction: Direction) -> tuple[Pins, ...]:
    """What tuning may choose from, on GPUs that have the most shared memory."""
    variant = Variant(FAMILY_NAME, f"sequence_{direction}", "cuda", kind)
    given = {**_values(variant, direction), **tilings.LEAST, **tilings.HOPPER}
    return tuple(tuple(tiling.items()) for tiling in tilings.enumerate_tilings(given))


def _fused_constants(variant: Variant) -> dict[str, Static]:
    tiling = {name.upper(): value for name, value in variant.statics if isinstance(value, int)}
    return {"ELEMENT": variant.text("dtype"), "FUNCTION": variant.text("function"), **tiling}


def _fused_accepts(direction: Direction, variant: Variant, problem: RnnProblem) -> str | None:
    if reason := _rejects_kind(variant, problem):
        return reason
    values = {**_values(variant, direction), "dim": problem.dim}
    return first_broken(tilings.PROBLEM, values)


def _fused_exceeds_residency(
    direction: Direction, variant: Variant, problem: RnnProblem, sm_count: int
) -> str | None:
    values = {**_values(variant, direction), "dim": problem.dim, "sm_count": sm_count}
    return first_broken(tilings.RESIDENT, values)


def _fused_launch(
    direction: Direction, variant: Variant, problem: RnnProblem, sm_count: int
) -> Launch:
    values = {**_values(variant, direction), "dim": problem.dim}
    members, tile = tilings.members.value(values), tilings.tile.value(values)
    groups = problem.heads * -(-problem.batch // tile)
    at_once = max(1, min(groups, sm_count // members))
    published = problem.dim * (values["gates"] if direction == "backward" else 1)
    alone = (members == 1 and values["rows"] > 1) or values["cluster"]
    if (
        direction == "forward"
    ):  # Backwards a step publishes for the gradients of initial states, too.
        alone = alone or problem.time == 1
    ring = 0 if alone else tilings.RING * tile * published * values["item"]
    return _launch_of("sequence", direction, problem, at_once * members, at_once * ring)


#: SMs of the GPUs that costs are estimated for.
_TYPICAL = 128
#: What a step costs in clusters, in a block that waits for no other, and where a block has so many units
#: that it is the product that takes time; and what every further wait costs.
_CLUSTER, _ALONE, _MANY, _WAIT = {1: 0.3, 8: 0.5}, 0.5, 1.3, 0.35


def _fused_cost(direction: Direction, variant: Variant, problem: RnnProblem) -> float:
    """About how long a step of all batches and heads takes, in steps of one group. Of equals, the fewer
    blocks have to wait for each other, the better."""
    values = {**_values(variant, direction), "dim": problem.dim}
    members, tile = tilings.members.value(values), tilings.tile.value(values)
    groups = problem.heads * -(-problem.batch // tile)
    rounds = -(-groups // max(1, _TYPICAL // members))
    if values["cluster"]:
        step = _CLUSTER[values["cluster"]]
    elif members == 1 and values["rows"] > 1:
        step = _ALONE
    else:
        step = (_MANY if values["rows"] == 4 else 1) + _WAIT * (tilings.windows(values) - 1)
    return rounds * step + members / 1000


def _fused_serves(direction: Direction, statics: Pins, target: Target) -> bool:
    """Clusters are known to be worth their bytes on 9.0, where forwards they take the place of wide
    blocks. One of several blocks cannot be before."""
    pins = dict(statics)
    if pins.get("cluster"):
        return target.capability == (9, 0)
    wide = pins.get("rows") == 4
    return not (wide and direction == "forward" and target.capability == (9, 0))


def _fused_kernel(direction: Direction) -> Kernel:
    return Kernel(
        family=FAMILY_NAME,
        name=f"sequence_{direction}",
        language="cuda",
        parameters=parameters("sequence", direction),
        defaults=Space(_KINDS, lambda kind: _fused_tilings(kind, direction)),
        code=Code(
            source=f"sequence_{direction}.cu",
            entry=f"rnn_sequence_{direction}",
            constants=_fused_constants,
            warps=lambda variant: variant.number("rows") * variant.number("split"),
            shared=lambda variant: tilings.layer_bytes.value(_values(variant, direction)),
        ),
        rules=Rules(
            accepts=partial(_fused_accepts, direction),
            exceeds_residency=partial(_fused_exceeds_residency, direction),
            serves=partial(_fused_serves, direction),
        ),
        cost=partial(_fused_cost, direction),
        launch=partial(_fused_launch, direction),
        tunable=Tunable(Space(_KINDS, lambda kind: _fused_space(kind, direction))),
    )


# --- All steps, in Triton ---------------------------------------------------------------------


def _triton_tiles(kind: Pins) -> tuple[Pins, ...]:
    """Units of a head, at most, and batches of a program: as many as R leaves registers for."""
    units = 64 if ITEM_SIZE[str(dict(kind)["dtype"])] == 2 else 32
    return ((("units", units), ("batches", 16), ("warps", 4)),)


def _triton_constants(variant: Variant) -> dict[str, Static]:
    sizes = SIZES[variant.text("function")]  # type: ignore[index]
    return {
        "FUNCTION": variant.text("function"),
        "GATES": sizes.recurrent,
        "INPUTS": sizes.inputs,
        "BIAS": sizes.bias,
        "STATES": len(sizes.states),
        "KEPT": len(sizes.cache),
        "UNITS": variant.number("units"),
        "BATCHES": variant.number("batches"),
    }


def _triton_accepts(variant: Variant, problem: RnnProblem) -> str | None:
    if reason := _rejects_kind(variant, problem):
        return reason
    if problem.resets:
        return "states start anew, and only the kernels in CUDA know where"
    if problem.dim % 16 or any(stride % 16 for stride in problem.strides):
        return "hidden units and strides are not multiples of 16"
    most = variant.number("units")
    return f"hidden units of a head: {problem.dim} > {most}" if problem.dim > most else None


def _triton_kernel(direction: Direction) -> Kernel:
    def launch(variant: Variant, problem: RnnProblem, sm_count: int) -> Launch:
        tiles = -(-problem.batch // variant.number("batches"))
        return _launch_of("sequence", direction, problem, max(1, problem.heads * tiles))

    def elements(variant: Variant) -> dict[str, str]:
        of = {"bias": "float32", "workspace": "int64"}
        return {n: of.get(n, variant.text("dtype")) for n in pointers}

    pointers = _pointers("sequence", direction, "triton")

    return Kernel(
        family=FAMILY_NAME,
        name=f"sequence_{direction}",
        language="triton",
        parameters=parameters("sequence", direction, "triton"),
        defaults=Space(_KINDS, _triton_tiles),
        code=Code(
            source="triton_kernels.py",
            entry=f"sequence_{direction}",
            constants=_triton_constants,
            divisible=lambda variant: frozenset(
                {*pointers, "dim", *stride_names("sequence", direction)} - {"bias", "workspace"}
            ),
            elements=elements,
            # Before 9.0 the compiler stops at 128 registers, and 8 bytes of LSTM's gradients are left over.
            may_spill=frozenset(
                Variant(
                    FAMILY_NAME, "sequence_backward", "triton", (*kind, *_triton_tiles(kind)[0])
                )
                for kind in _KINDS
                if kind[0][1] != "float32" and kind[1][1] == "lstm" and direction == "backward"
            ),
        ),
        rules=Rules(_triton_accepts),
        launch=launch,
    )


# --- One step ---------------------------------------------------------------------------------


def _step_accepts(variant: Variant, problem: RnnProblem) -> str | None:
    if reason := _rejects_kind(variant, problem):
        return reason
    return "an odd number of hidden units" if problem.dim % 2 else None


def _step_kernel(direction: Direction) -> Kernel:
    def launch(variant: Variant, problem: RnnProblem, sm_count: int) -> Launch:
        pairs = problem.batch * problem.heads * problem.dim // 2
        return _launch_of(
            "step", direction, problem, max(1, -(-pairs // (32 * variant.number("warps"))))
        )

    return Kernel(
        family=FAMILY_NAME,
        name=f"step_{direction}",
        language="cuda",
        parameters=parameters("step", direction),
        defaults=Space(_KINDS, lambda kind: ((("warps", _STEP_WARPS),),)),
        code=Code(
            source=f"step_{direction}.cu",
            entry=f"rnn_step_{direction}",
            constants=_fused_constants,
        ),
        rules=Rules(_step_accepts),
        launch=launch,
    )


# --- The family -------------------------------------------------------------------------------

_KINDS: tuple[Pins, ...] = tuple(
    (("dtype", dtype), ("function", function)) for function, dtype in product(SIZES, DTYPES)
)


def _sample(scope: Scope, direction: Direction, function: str, dtype: str) -> Sample:
    batch, time, heads, dim = 16, 1024, 12, 32  # which runs on the smallest GPU, in both languages
    strides = dict.fromkeys(STRIDED[scope, direction], 0)
    sizes = SIZES[function]  # type: ignore[index]
    row = heads * dim
    per_time = {
        "inputs": sizes.inputs * row,
        "cache": len(sizes.cache) * row,
        "gates_grad": sizes.bias * row,
    }
    found: list[int] = []
    for tensor in strides:
        step = per_time.get(tensor, row)
        of = {"state": batch * time * row, "batch": time * step, "time": step}
        found += [of[dimension] for dimension in STRIDED[scope, direction][tensor]]
    problem = RnnProblem(
        scope=scope,
        direction=direction,
        function=function,  # type: ignore[arg-type]
        dtype=dtype,
        batch=batch,
        time=time,
        heads=heads,
        dim=dim,
        strides=tuple(found),
        graded=1,
        training=True,
    )
    return Sample(problem, dtype, "aligned")


_SCOPES: tuple[Scope, ...] = ("sequence", "step")
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

FAMILY = Family(
    name=FAMILY_NAME,
    summary="LSTM, GRU, Elman and sLSTM networks with a recurrent matrix per head",
    folder=FOLDER,
    on_cpu=True,
    by_torch=("float64",),
    kernels=(
        *map(_fused_kernel, _DIRECTIONS),
        *map(_step_kernel, _DIRECTIONS),
        *map(_triton_kernel, _DIRECTIONS),
    ),
    samples=tuple(
        _sample(scope, direction, function, dtype)
        for scope, direction, function, dtype in product(_SCOPES, _DIRECTIONS, SIZES, DTYPES)
    ),
)
