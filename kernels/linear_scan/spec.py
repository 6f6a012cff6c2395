"""What the linear_scan family is made of: kernels, variants, what each accepts and how it launches.

Sources: ``time_last_*.cu``, ``channel_last_*.cu``, ``reduction.cu`` and ``gates_sum.cu`` with their ``.cuh`` headers,
``triton_kernels.py`` and ``triton_columns.py``. ``parameters`` gives the signature of every entry point.

Access ``aligned`` moves 16 bytes at a time and takes scans without options, ``varlen`` packed sequences, ``misaligned`` rows off
16-byte boundaries, ``multi_cta`` such rows in few columns of 16-bit elements, ``narrow`` few contiguous channels of float32 at any
address, ``scalar`` contiguous channels at any address, in tiles that look back, ``constant_gate`` few such channels with one gate
for all steps, ``short`` short rows of contiguous time without gaps, ``one_gate`` long ones with one gate for all
steps, ``resident`` such rows and few such channels where shared memory has room for the scan; ``generic`` takes all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from itertools import product, starmap

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan import (
    columns,
    cuda_tiles,
    gates_sum,
    languages,
    multi_cta,
    narrow,
    registers,
    rings,
    space,
    streams,
    timing_model,
)
from scan_registry.kernels.linear_scan.designs import design_of
from scan_registry.kernels.linear_scan.problem import (
    DIMENSIONS,
    MOST_ALONG_Y,
    ONE_GATE,
    REDUCTION_TILE,
    STRIDED,
    Direction,
    Layout,
    LinearScanProblem,
    ceil_div,
    sample_facts,
    state_dtype,
)
from scan_registry.kernels.linear_scan.space import FAMILY_NAME, FOLDER, Tile, reductions, scans
from scan_registry.kernels.linear_scan.summary import summaries
from scan_registry.kernels.model import (
    ITEM_SIZE,
    Code,
    Family,
    Kernel,
    Language,
    Launch,
    Parameter,
    Pins,
    Rules,
    Sample,
    Space,
    Static,
    Variant,
)

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "reduction", "summary")
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
    "summary": ("gates", "tokens", "final_gate", "final_state", "workspace"),
}
#: How a launch cuts the problem.
_CUTS = {"reduction": ("groups",), "summary": ("share", "shares", "segments")}


@cache
def parameters(direction: Direction) -> tuple[Parameter, ...]:
    """The signature shared by all kernels of one direction."""
    pointers = [Parameter(name, "pointer") for name in _POINTERS[direction]]
    sizes = ["outer", "batch", "channels", "time", "sequences"]
    strides = [f"{tensor}_{axis}" for tensor, axis in product(STRIDED[direction], DIMENSIONS)]
    integers = (*sizes, *strides, *_CUTS.get(direction, ()), "flags")
    return (*pointers, *(Parameter(name, "i64") for name in integers))


def _rejects_dtype(variant: Variant, problem: LinearScanProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    return None


def _rejects_static(variant: Variant, problem: LinearScanProblem) -> str | None:
    if reason := _rejects_dtype(variant, problem):
        return reason
    if variant.text("gates") != problem.gates_dtype:
        return f"gates in {variant.text('gates')}, not {problem.gates_dtype}"
    if problem.sums and not (variant.language == "cuda" and design_of(variant).sums(variant)):
        return "it does not sum the gradient of gates"
    if dict(variant.statics).get("reverse", problem.reverse) != problem.reverse:
        return "it scans the other way"
    return _rejects_access(variant.text("access"), problem)


def _rejects_access(access: str, problem: LinearScanProblem) -> str | None:
    if access == "varlen" and problem.sequences == 0:
        return "no sequences are packed"
    if access in space.PLAIN[problem.layout] and access != space.SCALAR and problem.sequences > 0:
        return "sequences are packed"
    if access != "generic" and not problem.plain(widely=access in (space.RESIDENT, space.SCALAR)):
        return "gates are mixed or broadcast, or batches do not fold into one dimension"
    return None


def _reduction_launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    cut = problem.reduction()
    channels, times = cut.tiles
    return Launch((cut.kept * cut.groups * channels * times, 1, 1), problem.scalars())


# --- CUDA -------------------------------------------------------------------------------------


def _may_reset(variant: Variant) -> int:
    """Where a new sequence may start: 1 at any step, 2 at those that a kernel looks up and composes by itself, 0 nowhere, as
    in a column that is a sequence."""
    of_access = {"generic": 1, "varlen": 0 if streams.is_column_serial(variant) else 2}
    return of_access.get(str(dict(variant.statics).get("access", "generic")), 0)


def _cuda_constants(variant: Variant) -> dict[str, Static]:
    statics = dict(variant.statics)
    access = statics.get("access", "generic")
    tile = {name.upper(): value for name, value in variant.statics if isinstance(value, int)}
    return {
        "ELEMENT": variant.text("dtype"),
        "GATE_ELEMENT": statics.get("gates", variant.text("dtype")),
        "ALIGNED": int(access != "generic"),
        "VARLEN": int(access == "varlen"),
        "MAY_RESET": _may_reset(variant),
        "MISALIGNED": int(streams.takes_misaligned(variant)),
        **({} if streams.takes_one_gate(variant) else {"EACH_GATE": 1}),
        **({"NARROW": 1, "AREA": narrow.AREA} if access == space.NARROW else {}),
        **({"CONSTANT_GATE": 1} if access == space.CONSTANT_GATE else {}),
        # The first row of each scan in a tile starts a new one.
        **({"SCALAR": 1, "MAY_RESET": 2} if access == space.SCALAR else {}),
        **({"SHORT_ROWS": 1} if access == space.SHORT else {}),
        **({"RESIDENT": 1} if access == space.RESIDENT else {}),
        **({"ONE_GATE": 1} if access == space.ONE_GATE else {}),
        **({"MISALIGNED": 1} if access == space.MULTI_CTA else {}),
        "STAGES": 0,
        "PREFIX_LEAD": 0,
        "CTAS_PER_COLUMN": 1,
        "SINGLE_WAVE": 0,
        "COLUMN_SERIAL": int(streams.is_column_serial(variant)),
        **tile,
    }


def _cuda_accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    return _rejects_static(variant, problem) or design_of(variant).accepts(variant, problem)


def _cuda_times(variant: Variant) -> int:
    return design_of(variant).times(variant)


def _cuda_cost(variant: Variant, problem: LinearScanProblem) -> float:
    return design_of(variant).cost(variant, problem)


def _cuda_launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    return design_of(variant).launch(variant, problem, sm_count)


def _exceeds_residency(variant: Variant, problem: LinearScanProblem, sm_count: int) -> str | None:
    if variant.text("access") == space.MULTI_CTA:
        return multi_cta.exceeds_residency(variant, problem, sm_count)
    return streams.exceeds_residency(variant, problem, sm_count)


def _may_spill(kernel: str, defaults: Space) -> dict[Variant, int]:
    """Backwards over rows with packed sequences, 16 bytes on sm_100: a warp less would take 10% more time on an H200. Tiles that
    look back, up to 40 bytes on sm_86, sm_89 and sm_100, and none on sm_90: a CTA less for each SM would take 6 to 15% more, also on
    an H200, and 64 bytes there took 16% more."""
    access, most = {"time_last_backward": (space.VARLEN, 16)}.get(kernel, (space.SCALAR, 40))
    spilling = (statics for statics in defaults if ("access", access) in statics)
    return {Variant(FAMILY_NAME, kernel, "cuda", statics): most for statics in spilling}


def _cuda_kernel(layout: Layout, direction: Direction) -> Kernel:
    name = f"{layout}_{direction}"
    time_last = layout == "time_last"
    accesses = (*space.PLAIN[layout], "generic", space.VARLEN)
    # Of contiguous channels, generic variants take packed sequences where tables name no other.
    usual = accesses if time_last else accesses[:-1]
    defaults = scans(partial(cuda_tiles.usual, layout, direction), usual, cuda_tiles.mixed(layout))
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="cuda",
        parameters=parameters(direction),
        defaults=defaults,
        code=Code(
            source=f"{name}.cu",
            entry=f"{FAMILY_NAME}_{name}",
            constants=_cuda_constants,
            warps=lambda variant: rings.warps(dict(variant.statics)),
            shared=lambda variant: design_of(variant).shared(direction, variant),
            may_spill=_may_spill(name, defaults),
        ),
        rules=Rules(
            accepts=_cuda_accepts,
            kind_mismatch=_rejects_static,
            exceeds_residency=_exceeds_residency,
            serves=partial(cuda_tiles.serves, direction),
            ships=cuda_tiles.ships,
        ),
        cost=_cuda_cost,
        launch=_cuda_launch,
        tunable=space.tunable(
            name,
            "cuda",
            scans(partial(cuda_tiles.every, layout, direction), accesses),
            defaults,
            _cuda_accepts,
            _cuda_times,
            cuda_tiles.ships,
            streams.packs,
            streams.tile_efficiency,
            timing_model.predicted,
        ),
    )


def _cuda_reduction_code(layout: Layout) -> Code:
    time_last = int(layout == "time_last")
    return Code(
        source="reduction.cu",
        entry=f"{FAMILY_NAME}_reduction",
        constants=lambda variant: {**_cuda_constants(variant), "TIME_LAST": time_last},
    )


# --- Triton -----------------------------------------------------------------------------------


def _triton_tiles(
    layout: Layout, direction: Direction, dtype: str, access: str
) -> tuple[Tile, ...]:
    """Of contiguous time: rows of a program, time steps of a tile, warps. Wide dtypes gain nothing from reading 16 bytes
    at once."""
    if access == "aligned" and ITEM_SIZE[dtype] == 8:
        return ()
    if layout == "channel_last":
        return (columns.usual(direction, dtype, access),)
    times = 128 if access == "generic" else 256
    if ITEM_SIZE[dtype] == 8:  # of wide ones, fewer fit
        return ({"rows": 1, "times": times, "warps": 1},)
    tile: Tile = {"rows": 1, "times": 2 * times, "warps": 2}
    # Which way 16 bytes are read is for the compiler to know; scans against time are for the generic variant.
    return (tile,) if access == "generic" else ({**tile, "reverse": 0},)


def _triton_serves(statics: Pins, target: Target) -> bool:
    """PTX, which is for GPUs that are not known, has variants that take everything."""
    return not target.is_ptx or ("access", "aligned") not in statics


#: Tiles of rows that a program has in hand. Backward loads directly, since asynchronous copies cannot move
#: single 16-bit elements, which is what t-1 and t+1 come as; a program per row are enough of them.
_STAGES = {"time_last_forward": 3, "time_last_backward": 1}


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
        tile = {"REVERSE": 0, "STAGES": _STAGES[variant.kernel]} | tile
    else:
        tile["GROUPS"] = columns.groups(variant)
    return {"ALIGNED": int(statics["access"] == "aligned")} | complex_numbers | tile


def _triton_elements(variant: Variant, direction: Direction) -> dict[str, str]:
    """What each pointer points to; a complex number is two floats in Triton."""
    dtype = variant.text("dtype")
    state = state_dtype(dtype)
    gates = state if direction == "reduction" else variant.text("gates")
    of = {"gates": gates, "gates_grad": gates, "offsets": "int64", "workspace": "int64"}
    boundary = ("initial_state", "final_state", "initial_state_grad", "final_state_grad")
    of |= dict.fromkeys(boundary, state)
    dtypes = {name: of.get(name, dtype) for name in _POINTERS[direction]}
    return {n: "float32" if element == "complex64" else element for n, element in dtypes.items()}


def _triton_divisible(variant: Variant, layout: Layout, direction: Direction) -> frozenset[str]:
    """In the aligned variants: the sequences, their rows' length and the strides between rows."""
    if dict(variant.statics).get("access") != "aligned":
        return frozenset()
    outside = ("batch", "channel") if layout == "time_last" else ("batch", "time")
    sequences = {name for name in STRIDED[direction] if name != "state"}
    strides = {f"{tensor}_{dim}" for tensor in sequences for dim in outside}
    row = "time" if layout == "time_last" else "channels"
    outputs = ("gates_grad", "tokens_grad") if direction == "backward" else ()
    return frozenset({*(sequences - {"grads"}), *outputs, *strides, row})


def _triton_accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    if reason := _rejects_static(variant, problem):
        return reason
    if variant.text("access") != "aligned":
        return None
    if not problem.whole_chunks(16):
        return "row length and strides are not multiples of 16 elements"
    return ONE_GATE if problem.one_gate_a_row() else None


def _triton_cost(variant: Variant, problem: LinearScanProblem) -> float:
    if problem.layout == "channel_last":
        return registers.channel_last_cost(variant, problem)
    return registers.walk_cost(variant, problem, _triton_times(variant))


def _triton_launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    batches = problem.outer * problem.batch
    if problem.layout == "time_last":
        programs = ceil_div(batches * problem.channels, variant.number("rows"))
    else:
        programs = batches * ceil_div(problem.channels, variant.number("channels"))
    sequences = max(1, problem.sequences)
    y = min(sequences, MOST_ALONG_Y)  # packed sequences lie along y, more of them along z
    return Launch((programs, y, ceil_div(sequences, y)), problem.scalars())


def _triton_times(variant: Variant) -> int:
    """Times that a tile covers."""
    if variant.kernel.startswith("time_last"):
        return variant.number("times")
    return columns.times(variant)


def _triton_kernel(layout: Layout, direction: Direction) -> Kernel:
    name = f"{layout}_{direction}"
    defaults = scans(partial(_triton_tiles, layout, direction))
    tiles = space.triton_time_last if layout == "time_last" else columns.tiles
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="triton",
        parameters=parameters(direction),
        defaults=defaults,
        code=_triton_code(layout, direction),
        rules=Rules(_triton_accepts, _rejects_static, serves=_triton_serves),
        cost=_triton_cost,
        launch=_triton_launch,
        tunable=space.tunable(
            name, "triton", scans(tiles), defaults, _triton_accepts, _triton_times
        ),
    )


def _triton_code(layout: Layout, direction: Direction) -> Code:
    in_columns = layout == "channel_last" and direction != "reduction"
    return Code(
        source="triton_columns.py" if in_columns else "triton_kernels.py",
        entry=f"{layout}_{direction}",
        constants=_triton_constants,
        divisible=lambda variant: _triton_divisible(variant, layout, direction),
        elements=lambda variant: _triton_elements(variant, direction),
        # Where rests are kept: a sum's rounding error can be had only if its terms are rounded first.
        fuses=lambda variant: ITEM_SIZE[variant.text("dtype")] < 4,
    )


# --- The family -------------------------------------------------------------------------------


def _sample(layout: Layout, direction: Direction, dtype: str, access: str) -> Sample:
    facts = sample_facts(layout, dtype, access, len(STRIDED[direction]) - 1)
    return Sample(LinearScanProblem(direction=direction, **facts), dtype, access)


def _reduction(layout: Layout, language: Language) -> Kernel:
    unit, other = REDUCTION_TILE
    cuda = language == "cuda"
    return Kernel(
        family=FAMILY_NAME,
        name=f"{layout}_reduction",
        language=language,
        parameters=parameters("reduction"),
        defaults=reductions({"warps": 8} if cuda else {"unit": unit, "other": other, "warps": 4}),
        code=_cuda_reduction_code(layout) if cuda else _triton_code(layout, "reduction"),
        rules=Rules(_rejects_dtype),
        launch=_reduction_launch,
    )


def _triton_kernels(layout: Layout) -> tuple[Kernel, ...]:
    both = (_triton_kernel(layout, direction) for direction in DIRECTIONS[:2])
    return (*both, _reduction(layout, "triton"))


FAMILY = Family(
    name=FAMILY_NAME,
    summary="x[t] = gates[t] * x[t-1] + tokens[t]",
    folder=FOLDER,
    kernels=(
        *starmap(_cuda_kernel, product(LAYOUTS, DIRECTIONS[:2])),
        *(_reduction(layout, "cuda") for layout in LAYOUTS),
        *summaries(parameters("summary"), _cuda_constants, _rejects_static),
        gates_sum.KERNEL,
        *(kernel for layout in LAYOUTS for kernel in _triton_kernels(layout)),
    ),
    samples=(
        *starmap(_sample, product(LAYOUTS, DIRECTIONS, space.DTYPES, space.ACCESSES)),
        gates_sum.SAMPLE,
    ),
    on_cpu=True,
    languages=languages.languages,
)
