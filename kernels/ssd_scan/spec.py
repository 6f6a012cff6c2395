"""What the ssd_scan family is made of: kernels, variants, what each accepts and how it launches.

``forward.cu``, ``states.cu`` and ``backward.cu`` have the algorithms; ``problem.py`` the tensors. ``states.cu`` is compiled twice: forwards
in time, for the states before chunks, and with REVERSE backwards, for the gradients of the states after them. The code for sm_90
multiplies 16-bit elements by warpgroups, which later GPUs cannot; the same source multiplies by warps for the others. float32 is
multiplied by warps everywhere, as TF32 in three products (``wide_products.cuh``), and takes shared memory that not all GPUs have: the
forward pass with up to 64 states takes 74 KB, with up to 128 122 KB and with more 218 KB, and the backward pass 152 KB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product, starmap
from pathlib import Path

from scan_registry.base.strides import stride_names
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import (
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
    Variant,
)
from scan_registry.kernels.ssd_scan.problem import (
    BLOCK,
    CHUNK,
    DIRECTIONS,
    DTYPES,
    MOST_SIZE,
    MOST_STATES,
    MOST_STRIDE,
    PIECE,
    SIZE,
    SMALL_BLOCK,
    STRIDED,
    Direction,
    SSDScanProblem,
    block_of,
    most_heads,
)

FAMILY_NAME = "ssd_scan"
FOLDER = Path(__file__).parent
#: Columns of the tiles of B, C and states that each kernel has, and its warps.
TILES: dict[Direction, tuple[int, ...]] = {
    "forward": (64, 128, MOST_STATES),
    "states": (64, 128),
    "adjoint": (64, 128),
    "backward": (SMALL_BLOCK, BLOCK),
}
#: Those of float32, which takes twice the memory. Its forward pass is compiled for z alone, and states with two stages.
_WIDE_TILES = TILES | {"states": (64,), "adjoint": (64,), "backward": (SMALL_BLOCK,)}
_WARPS: dict[Direction, int] = {"forward": 8, "states": 4, "adjoint": 4, "backward": 8}
#: Chunks or heads that are in shared memory at once.
_STAGES = (1, 2)
#: Tiles of 16 bits whose outputs have two warpgroups that take turns: states, stages, gated, heads and outputs. They need products
#: by warpgroups. For how many chunks their shared memory has the decays of steps.
_APART = ((64, 4, 0, 2, 2), (128, 4, 0, 2, 2), (MOST_STATES, 3, 0, 1, 2))
_KEPT_CHUNKS = 8
#: Those of a backward pass whose warpgroups have work of their own: states, stages and warps.
_BACKWARD_APART = ((SMALL_BLOCK, 3, 12), (BLOCK, 3, 12))
#: Bytes of the maps by which a CTA of these copies x, B, C and outputs; x, the output's gradient, states, adjoints and x_grad.
_MAPS = {"forward": 4 * 128, "states": 2 * 128, "adjoint": 2 * 128, "backward": 5 * 128}
#: So few CTAs leave SMs empty, with tiles of half the states twice as many.
_FEW_CTAS = 200

#: Kernels' pointers, those that they read first; and their sources.
POINTERS: dict[Direction, tuple[str, ...]] = {
    "forward": (
        *("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state", "cu_seqlens", "seq_idx"),
        *("out", "ungated", "final_state", "workspace"),
    ),
    "states": (
        *("x", "dt", "A", "B", "dt_bias", "initial_state", "cu_seqlens", "seq_idx"),
        *("states", "final_state", "sequence_decays", "workspace"),
    ),
    "adjoint": (
        *("dt", "A", "C", "dt_bias", "out_grad", "final_grad", "cu_seqlens", "seq_idx"),
        *("adjoints", "initial_grad", "workspace"),
    ),
    "backward": (
        *("x", "dt", "A", "B", "C", "D", "dt_bias", "out_grad", "cu_seqlens", "seq_idx"),
        *("states", "adjoints"),
        *("x_grad", "dt_grad", "head_grads", "B_grad", "C_grad", "workspace"),
    ),
}
_SOURCES = {"adjoint": "states.cu"}
_SIZES = ("batch", "time", "heads", "groups", "head_size", "state_size", "sequences", "slots")
#: Integers that not all kernels take.
_OWN: dict[Direction, tuple[str, ...]] = {
    "forward": ("D_channel",),
    "backward": ("splits", "D_channel"),
}


def parameters(direction: Direction) -> tuple[Parameter, ...]:
    """The signature of one kernel."""
    own = _OWN.get(direction, ())
    integers = (*_SIZES, *own, "flags", "dt_low", "dt_high", *stride_names(STRIDED[direction]))
    pointers = (Parameter(name, "pointer") for name in POINTERS[direction])
    return (*pointers, *(Parameter(name, "i64") for name in integers))


def _apart(variant: Variant) -> bool:
    """Whether warpgroups have work of their own (``forward_apart.cuh``, ``backward_apart.cuh``)."""
    if variant.kernel == "forward":
        return variant.number("outputs") > 1
    return variant.number("stages") > _STAGES[-1]


def _kind_mismatch(variant: Variant, problem: SSDScanProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    return None


def _accepts(variant: Variant, problem: SSDScanProblem) -> str | None:
    if reason := _kind_mismatch(variant, problem) or _size_mismatch(problem):
        return reason
    if problem.direction == "forward" and problem.gated > variant.number("gated"):
        return "compiled without z and D of (heads, P)"
    if problem.direction == "forward" and problem.group_heads % variant.number("heads"):
        return f"{problem.group_heads} heads share B and C; a CTA takes {variant.number('heads')} that do"
    columns = variant.number("states")
    of_CTA = {"forward": problem.state_size, "backward": problem.block}.get(problem.direction, 0)
    if of_CTA > columns or (problem.direction == "backward" and of_CTA < columns):
        return f"{of_CTA} states of a CTA; its tile has {columns}"
    return None


def _size_mismatch(problem: SSDScanProblem) -> str | None:
    sizes = {"heads of a size": (problem.head_size, MOST_SIZE)}
    sizes["a number of states"] = (problem.state_size, MOST_STATES)
    for words, (count, most) in sizes.items():
        if count % PIECE or count > most:
            return f"{words} of {count}; accepted are multiples of {PIECE} up to {most}"
    if problem.time >= 2**31:
        return f"{problem.time} steps; they are counted in 32 bits"
    if any(abs(stride) >= MOST_STRIDE for stride in problem.short_strides):
        return f"a stride of steps, heads or groups from {MOST_STRIDE} elements on"
    most = most_heads(problem.dtype)
    if problem.direction == "backward" and problem.split_heads > most:
        return f"{problem.split_heads} heads of a CTA; it has memory for {most}"
    return None


def _walks(problem: SSDScanProblem, columns: int, heads: int = 1) -> int:
    """CTAs of a kernel that goes along time, with tiles of so many states of so many heads."""
    tiles = -(-problem.head_size // SIZE) * -(-problem.state_size // columns)
    return tiles * problem.heads // heads * problem.batch * max(1, problem.sequences)


def _grid(variant: Variant, problem: SSDScanProblem) -> tuple[int, int, int]:
    if problem.direction == "backward":
        return problem.slots * problem.batch, problem.groups * problem.splits, 1
    heads = variant.number("heads") if problem.direction == "forward" else 1
    return _walks(problem, variant.number("states"), heads), 1, 1


def _launch(variant: Variant, problem: SSDScanProblem, sm_count: int) -> Launch:
    known = problem.scalars()
    integers = [p.name for p in parameters(problem.direction) if p.kind == "i64"]
    grid = _grid(variant, problem)
    maps = _MAPS[variant.kernel] * grid[0] * grid[1] if _apart(variant) else 0
    return Launch(grid, {name: known[name] for name in integers}, maps, zeroed=False)


def _wide(variant: Variant) -> bool:
    return variant.text("dtype") == "float32"


def _constants(variant: Variant) -> dict[str, Static]:
    numbers, wide = (
        {name.upper(): variant.number(name) for name in ("states", "stages")},
        _wide(variant),
    )
    if variant.kernel == "forward":
        one = wide or numbers["STATES"] > 128 or _apart(variant)
        own = {name.upper(): variant.number(name) for name in ("gated", "heads", "outputs")}
        numbers |= own | {"CTAS": 1 if one else 2}
    elif variant.kernel != "backward":
        fit = {64: 4, 128: 2}[numbers["STATES"]] if _apart(variant) else 2 if wide else 3
        numbers |= {"CTAS": fit, "REVERSE": int(variant.kernel == "adjoint")}
    return {"ELEMENT": variant.text("dtype"), **numbers}


def _shared(variant: Variant) -> int:
    """Bytes of dynamic shared memory: the tiles, and float32 for each step, of which float32's sums take two."""
    columns, stages, warps = (variant.number(name) for name in ("states", "stages", "warps"))
    size, of_steps = (4, 5) if _wide(variant) else (2, 4)
    chunk, kept, x = size * CHUNK * columns, size * SIZE * columns, size * CHUNK * SIZE
    apart, stage = _apart(variant), 8 if _apart(variant) else 0
    if variant.kernel == "forward" and apart:
        heads = variant.number("heads")
        steps = 4 * heads * _KEPT_CHUNKS * (of_steps * CHUNK + 1)
        return stages * (heads * x + chunk + stage) + 2 * (chunk + 8) + heads * kept + steps
    if variant.kernel == "forward":
        skips = SIZE * variant.number("gated")
        return stages * (x + 2 * chunk) + kept + 4 * (warps * (of_steps * CHUNK + 1) + skips)
    if variant.kernel != "backward":
        return stages * (x + chunk + stage) + kept + 4 * warps * (CHUNK + 1)
    of_heads = 4 * (of_steps - 1) * most_heads(variant.text("dtype")) * CHUNK
    tiles = 2 * chunk + stages * (2 * (x + kept) + stage) + of_heads
    if apart:
        terms = 4 * 4 * (9 * CHUNK + 4)
        return tiles + 2 * (x + 8) + terms
    terms = 4 * ((18 if _wide(variant) else 12) * CHUNK + warps)
    return tiles + size * CHUNK * CHUNK + x + 2 * terms


def _fits(kernel: Direction, statics: Pins, target: Target) -> bool:
    return _shared(Variant(FAMILY_NAME, kernel, "cuda", statics)) <= target.shared_memory


def _serves(kernel: Direction, statics: Pins, target: Target) -> bool:
    """With as many stages as shared memory has room for."""
    named = dict(statics)
    if "stages" not in named:
        return True
    by_warpgroups = target.capability == (9, 0) and not target.is_ptx
    if _apart(Variant(FAMILY_NAME, kernel, "cuda", statics)):
        return by_warpgroups
    if by_warpgroups and _replaced(kernel, named):
        return False
    more = tuple((named | {"stages": int(named["stages"]) + 1}).items())
    last = named["stages"] == _STAGES[-1]
    return _fits(kernel, statics, target) and (last or not _fits(kernel, more, target))


def _replaced(kernel: Direction, named: Mapping[str, Static]) -> bool:
    """Whether there is a tile with the same heads and states whose warpgroups have work of their own."""
    if named["dtype"] == "float32":
        return False
    names = ("states", "gated", "heads")
    same = any((tile[0], *tile[2:4]) == tuple(map(named.get, names)) for tile in _APART)
    return kernel != "forward" or same


def _cost(variant: Variant, problem: SSDScanProblem) -> float:
    """The tile that leaves the least empty; smaller ones where there are few CTAs; what is compiled for z only where it has to be; and
    outputs that take turns."""
    columns = variant.number("states")
    if problem.direction in ("states", "adjoint"):
        few = columns > 64 and _walks(problem, columns) < _FEW_CTAS
        return abs(columns - min(128, problem.state_size)) + (1000 if few else 0)
    if problem.direction == "forward":
        return columns + 2 * variant.number("gated") - variant.number("outputs")
    return columns


def _tiles(direction: Direction, dtype: str) -> tuple[Pins, ...]:
    wide = dtype == "float32"
    columns = (_WIDE_TILES if wide else TILES)[direction]
    stages = (2,) if wide and direction in ("states", "adjoint") else _STAGES
    choices: dict[str, tuple[int, ...]] = {"states": columns, "stages": stages}
    more: tuple[tuple[int, ...], ...] = ()
    if direction == "forward":
        choices |= {"gated": (1,) if wide else (0, 1), "heads": (1,), "outputs": (1,)}
        more = () if wide else tuple((*tile, 4 * sum(tile[3:])) for tile in _APART)
    if direction == "backward" and not wide:
        more = _BACKWARD_APART
    if direction in ("states", "adjoint") and not wide:
        more = tuple((count, 3, _WARPS[direction]) for count in columns)
    choices["warps"] = (_WARPS[direction],)
    return tuple(
        tuple(zip(choices, tile, strict=True)) for tile in (*product(*choices.values()), *more)
    )


def _may_spill(direction: Direction) -> dict[Variant, int]:
    """Forwards up to 48 bytes, and in the states before chunks 24 on sm_100, for which a CTA more fits an SM; backwards up to 128
    bytes on sm_80, as the gradients of B and C fill the registers. Most of it is stored and loaded outside of the loops over chunks and
    heads."""
    most = {"forward": 48, "backward": 128}.get(direction, 24)
    return {
        Variant(FAMILY_NAME, direction, "cuda", (("dtype", dtype), *tile)): most
        for dtype in DTYPES
        for tile in _tiles(direction, dtype)
    }


def _kernel(direction: Direction) -> Kernel:
    return Kernel(
        family=FAMILY_NAME,
        name=direction,
        language="cuda",
        parameters=parameters(direction),
        defaults=Space(
            tuple((("dtype", dtype),) for dtype in DTYPES),
            lambda kind: _tiles(direction, str(dict(kind)["dtype"])),
        ),
        code=Code(
            source=_SOURCES.get(direction, f"{direction}.cu"),
            entry=f"{FAMILY_NAME}_{direction}",
            constants=_constants,
            shared=_shared,
            exact=frozenset({(9, 0)}),
            may_spill=_may_spill(direction),
        ),
        rules=Rules(_accepts, kind_mismatch=_kind_mismatch, serves=partial(_serves, direction)),
        cost=_cost,
        launch=_launch,
        not_on_cpu=None
        if direction in ("forward", "backward")
        else "on the CPU no kernel hands states of chunks on to another",
    )


def _sample(direction: Direction, dtype: str, states: int) -> Sample:
    batch, time, heads, size = 8, 2048, 32, 64
    strides_of = {
        "x": (time * heads * size, heads * size, size),
        "dt": (time * heads, heads, 1),
        "B": (time * states, states, states),
    }
    strides_of |= {"C": strides_of["B"], "grad": strides_of["x"], "z": (0, 0, 0)}
    problem = SSDScanProblem(
        *(direction, dtype),
        *(batch, time, heads, 1, size, states),
        strides=tuple(stride for name in STRIDED[direction] for stride in strides_of[name]),
        softplus=True,
        splits=heads // most_heads(dtype),
        block=SMALL_BLOCK,
    )

    def posed(shared_memory: int) -> SSDScanProblem:
        return replace(problem, block=block_of(states, dtype, shared_memory))

    by_memory = posed if direction == "backward" else None
    return Sample(problem, dtype, "aligned", f"{states} states", by_memory)


FAMILY = Family(
    name=FAMILY_NAME,
    summary="s[t] = exp(dt * A) * s[t-1] + dt * x[t] (x) B[t]; out = s . C, of heads with one decay each",
    folder=FOLDER,
    kernels=tuple(map(_kernel, DIRECTIONS)),
    samples=tuple(starmap(_sample, product(DIRECTIONS, DTYPES, TILES["forward"]))),
    stand_in="torch's matrix products, chunk by chunk",
)
