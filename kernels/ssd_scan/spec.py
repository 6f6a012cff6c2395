"""What the ssd_scan family is made of: kernels, variants, what each accepts and how it launches.

``states.cu``, ``forward.cu`` and ``backward.cu`` have the algorithms; ``problem.py`` the tensors. ``states.cu`` is compiled twice: forwards
in time, for the states before chunks, and with REVERSE backwards, for the gradients of the states after them.
"""

from __future__ import annotations

from itertools import product, starmap
from pathlib import Path

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
    CHUNK,
    DIRECTIONS,
    DTYPES,
    MOST_SIZE,
    MOST_STATES,
    PIECE,
    STRIDED,
    Direction,
    SSDScanProblem,
    stride_names,
)

FAMILY_NAME = "ssd_scan"
FOLDER = Path(__file__).parent
#: Tiles of N and of P, with the warps that compute them.
TILES = tuple((states, size, 4) for states in (64, 128, MOST_STATES) for size in (64, MOST_SIZE))

#: Kernels' pointers, those that they read first; and their sources.
POINTERS: dict[Direction, tuple[str, ...]] = {
    "states": (
        *("x", "dt", "A", "B", "dt_bias", "initial_state", "cu_seqlens", "seq_idx"),
        *("states", "final_state"),
    ),
    "forward": (
        *("x", "dt", "A", "B", "C", "D", "dt_bias", "cu_seqlens", "seq_idx", "states"),
        "out",
    ),
    "adjoint": (
        *("dt", "A", "C", "dt_bias", "out_grad", "final_grad", "cu_seqlens", "seq_idx"),
        *("adjoints", "initial_grad"),
    ),
    "backward": (
        *("x", "dt", "A", "B", "C", "D", "dt_bias", "out_grad", "cu_seqlens", "seq_idx"),
        *("states", "adjoints"),
        *("x_grad", "dt_grad", "A_grad", "D_grad", "B_grad", "C_grad"),
    ),
}
_SOURCES = {"adjoint": "states.cu"}
_SIZES = ("batch", "time", "heads", "groups", "head_size", "state_size", "sequences", "slots")


def parameters(direction: Direction) -> tuple[Parameter, ...]:
    """The signature of one kernel."""
    splits = ("splits",) if direction == "backward" else ()
    integers = (*_SIZES, *splits, "flags", "dt_low", "dt_high", *stride_names(direction))
    pointers = (Parameter(name, "pointer") for name in POINTERS[direction])
    return (*pointers, *(Parameter(name, "i64") for name in integers))


def _kind_mismatch(variant: Variant, problem: SSDScanProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    return None


def _accepts(variant: Variant, problem: SSDScanProblem) -> str | None:
    if reason := _kind_mismatch(variant, problem):
        return reason
    sizes = {"size": problem.head_size, "states": problem.state_size}
    for name, count in sizes.items():
        if count % PIECE:
            return f"{_WORDS[name]} of {count}; accepted are multiples of {PIECE}"
        if count > variant.number(name):
            return f"{_WORDS[name]} of {count}; its tile has {variant.number(name)}"
    if problem.time >= 2**31:
        return f"{problem.time} steps; they are counted in 32 bits"
    return None


_WORDS = {"size": "heads of a size", "states": "a number of states"}


def _grid(problem: SSDScanProblem) -> tuple[int, int, int]:
    """A walk of sequences takes a CTA for each sequence and head; what chunks need, one for each slot and head, or split
    of the heads of a group."""
    if problem.direction in ("states", "adjoint"):
        return max(1, problem.sequences) * problem.batch, problem.heads, 1
    per_slot = problem.heads if problem.direction == "forward" else problem.groups * problem.splits
    return problem.slots * problem.batch, per_slot, 1


def _launch(variant: Variant, problem: SSDScanProblem, sm_count: int) -> Launch:
    known = problem.scalars()
    integers = [p.name for p in parameters(problem.direction) if p.kind == "i64"]
    return Launch(_grid(problem), {name: known[name] for name in integers})


def _constants(variant: Variant) -> dict[str, Static]:
    numbers = {name.upper(): value for name, value in variant.statics if isinstance(value, int)}
    reverse = {"REVERSE": 1} if variant.kernel == "adjoint" else {}
    return {"CHUNK": CHUNK, "ELEMENT": variant.text("dtype"), **reverse, **numbers}


def _shared(variant: Variant) -> int:
    """Bytes of dynamic shared memory."""
    return 0


def _cost(variant: Variant, problem: SSDScanProblem) -> float:
    """The tile that leaves the least empty."""
    return variant.number("states") * variant.number("size")


def _kernel(direction: Direction) -> Kernel:
    names = ("states", "size", "warps")
    tiles: tuple[Pins, ...] = tuple(tuple(zip(names, tile, strict=True)) for tile in TILES)
    return Kernel(
        family=FAMILY_NAME,
        name=direction,
        language="cuda",
        parameters=parameters(direction),
        defaults=Space(tuple((("dtype", dtype),) for dtype in DTYPES), lambda kind: tiles),
        code=Code(
            source=_SOURCES.get(direction, f"{direction}.cu"),
            entry=f"{FAMILY_NAME}_{direction}",
            constants=_constants,
            shared=_shared,
        ),
        rules=Rules(_accepts, kind_mismatch=_kind_mismatch),
        cost=_cost,
        launch=_launch,
    )


def _sample(direction: Direction, dtype: str) -> Sample:
    batch, time, heads, size, states = 8, 2048, 80, 64, 128
    strides_of = {
        "x": (time * heads * size, heads * size, size),
        "dt": (time * heads, heads, 1),
        "B": (time * states, states, states),
    }
    strides_of |= {"C": strides_of["B"], "grad": strides_of["x"]}
    problem = SSDScanProblem(
        direction=direction,
        dtype=dtype,
        batch=batch,
        time=time,
        heads=heads,
        groups=1,
        head_size=size,
        state_size=states,
        strides=tuple(stride for name in STRIDED[direction] for stride in strides_of[name]),
        softplus=True,
    )
    return Sample(problem, dtype, "aligned")


FAMILY = Family(
    name=FAMILY_NAME,
    summary="s[t] = exp(dt * A) * s[t-1] + dt * x[t] (x) B[t]; out = s . C, of heads with one decay each",
    folder=FOLDER,
    kernels=tuple(map(_kernel, DIRECTIONS)),
    samples=tuple(starmap(_sample, product(DIRECTIONS, DTYPES))),
    stand_in="torch's matrix products, chunk by chunk",
)
