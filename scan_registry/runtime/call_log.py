"""A line on stderr for each kind of call, at its first one: what runs, where it comes from, and why.

``SCAN_REGISTRY_LOG=info`` asks for it. Only calls that make a plan look at ``ON``, so later calls cost nothing in either case.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scan_registry import kernels
from scan_registry.base.environment import flag

if TYPE_CHECKING:
    from scan_registry.dispatch.select import Candidate, Decision

VARIABLE = "SCAN_REGISTRY_LOG"
ON = flag(VARIABLE)
#: In the names of functions that make plans; what bears none of these is a forward pass.
_PASSES = ("backward", "adjoint", "summary", "update")
#: Facts of a problem that its kernel's name has, too.
_IN_NAMES = ("kernel", "direction", "layout")
_told: set[str] = set()


def tell(text: str) -> None:
    """Print a line, once in a process; with its rank, if a launcher such as torchrun has set one."""
    if text not in _told:
        _told.add(text)
        rank = os.environ.get("RANK")
        process = "" if rank is None else f" [rank {rank}]"
        print(f"scan-registry:{process} {text}", file=sys.stderr)


def tell_decision(decision: Decision) -> None:
    """The line of a call whose tensors are on a GPU."""
    winner, problem = decision.taken(), decision.problem
    facts = {k: v for k, v in vars(problem).items() if isinstance(v, str | int) and v}
    described = ", ".join(
        f"{name} {value}" for name, value in facts.items() if name not in _IN_NAMES
    )
    tell(f"{decision.family.name}.{problem.kernel}, {described}: {_what(decision, winner)}")


def _what(decision: Decision, winner: Candidate) -> str:
    chosen = "" if decision.backend == "auto" else f"; backend is {decision.backend!r}"
    if winner.variant is None:
        reason = chosen or "; no kernel fits, and `scan-registry doctor` says why"
        return f"{decision.family.stand_in}, tier {winner.tier}{reason}"
    origin = "compiled here, or taken from the cache of what was"
    if winner.archive is not None:
        origin = f"from {winner.archive.provider}, {winner.archive.path}"
    rules = {
        "row": "a tuning table's time of a problem like it",
        "timing_model": "the timing model that is fitted to the tuning tables",
    }
    rule = rules.get(winner.rule or "", "the spec's estimate")
    return f"{winner.subject}, tier {winner.tier}, {origin}; by {rule}{chosen}"


def tell_plan(maker: Any, tensors: Sequence[Any], options: Sequence[Any]) -> None:
    """The line of a call that no kernel for GPUs is looked for: its tensors are on the CPU, or torch's operators are asked
    for. ``maker`` has made the plan, a function in the folder of its family."""
    present = [tensor for tensor in tensors if tensor is not None]
    backend = next((value for value in _flat(options) if value in ("auto", "reference")), "auto")
    if not present or (present[0].device.type != "cpu" and backend != "reference"):
        return
    owner = getattr(maker, "__self__", maker)
    module = (owner if owner is maker else type(owner)).__module__
    family = kernels.family(module.removeprefix(f"{kernels.__name__}.").partition(".")[0])
    direction = next((name for name in _PASSES if name in maker.__name__), "forward")
    inputs = dict.fromkeys(f"{_dtype(tensor)} {tuple(tensor.shape)}" for tensor in present)
    start = f"{family.name} {direction}, {', '.join(inputs)}"
    if backend == "reference":
        tell(f"{start}: torch's operators; backend is 'reference'")
    elif family.compiled_for_cpu(_dtype(present[0])):
        tell(f"{start}: this package's compiled code for the CPU, where the tensors are")
    else:
        tell(
            f"{start}: torch's operators on the CPU, where the tensors are; none of this is compiled"
        )


def _flat(options: Sequence[Any]) -> list[Any]:
    """The options, of which some may be in a tuple."""
    values = list[Any]()
    for option in options:
        values += option if isinstance(option, tuple) else [option]
    return [value for value in values if isinstance(value, str)]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
