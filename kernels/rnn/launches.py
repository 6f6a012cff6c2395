"""What the kernels of rnn have in common: their signatures, launches and kinds, and what none of them accepts."""

from __future__ import annotations

from itertools import product

from scan_registry.base.strides import stride_names
from scan_registry.kernels.model import Launch, Parameter, Pins, Variant
from scan_registry.kernels.rnn.problem import (
    DTYPES,
    SIZES,
    STRIDED,
    Direction,
    RnnProblem,
    Scope,
)

FAMILY_NAME = "rnn"

#: Each cell in each dtype.
KINDS: tuple[Pins, ...] = tuple(
    (("dtype", dtype), ("function", function)) for function, dtype in product(SIZES, DTYPES)
)

_POINTERS: dict[tuple[Scope, Direction], tuple[str, ...]] = {
    ("sequence", "forward"): (
        "inputs",
        "recurrent",
        "bias",
        "initial",
        "reset",
        "states",
        "cache",
        "workspace",
    ),
    ("sequence", "backward"): (
        "recurrent",
        "states",
        "initial",
        "reset",
        "cache",
        "states_grad",
        "final_grad",
        "gates_grad",
        "initial_grad",
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


def pointers(scope: Scope, direction: Direction, language: str) -> tuple[str, ...]:
    """The pointer parameters of one kernel. Triton's have no resets: what sLSTM's gradients keep fills the registers as it is."""
    names = _POINTERS[scope, direction]
    return names if language == "cuda" else tuple(name for name in names if name != "reset")


def parameters(scope: Scope, direction: Direction, language: str = "cuda") -> tuple[Parameter, ...]:
    """The signature of one kernel."""
    of_pointers = [Parameter(name, "pointer") for name in pointers(scope, direction, language)]
    sizes = ["batch", *(["time"] if scope == "sequence" else []), "heads", "dim"]
    options = ["forward_clip"] if direction == "forward" else ["graded", "recurrent_clip"]
    names = (*sizes, *options, *stride_names(STRIDED[scope, direction]))
    return (*of_pointers, *(Parameter(name, "i64") for name in names))


def launch_of(
    scope: Scope, direction: Direction, problem: RnnProblem, blocks: int, workspace: int = 0
) -> Launch:
    known = problem.scalars()
    wanted = [p.name for p in parameters(scope, direction) if p.kind == "i64"]
    return Launch((blocks, 1, 1), {name: known[name] for name in wanted}, workspace)


def rejects_kind(variant: Variant, problem: RnnProblem) -> str | None:
    """Why a variant is for something else; anything that its pairs and words cannot be read from."""
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    if variant.text("function") != problem.function:
        return f"function {variant.text('function')}, not {problem.function}"
    if problem.alignment < 16:
        return f"tensors are aligned to {problem.alignment} bytes; it takes 16"
    return None
