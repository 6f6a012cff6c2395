"""Several problems, any of which would do: a call that can be made in one launch, or else in many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Backend, Decision, Rejected, System, select
from scan_registry.kernels.model import Family, Problem


def select_first(
    system: System,
    family: Family,
    alternatives: Iterable[tuple[Problem, Backend]],
    lowest: Tier = Tier.REFERENCE,
) -> Decision:
    """The decision for the first of the problems that a kernel solves, each with what may solve it; what the ones before it rejected
    comes first among what it rejects. Where no kernel solves any, that for the first."""
    decisions: list[Decision] = []
    rejected: dict[Rejected, None] = {}
    for problem, backend in alternatives:
        decision = select(system, family, problem, backend, lowest)
        decisions.append(decision)
        if not any(kernel.name == problem.kernel for kernel in family.kernels):
            reason = "this version has no such kernel"
            rejected[Rejected(f"{family.name}.{problem.kernel}", reason)] = None
        if decision.launches:
            break
        rejected |= dict.fromkeys(decision.rejected)
    taken = decisions[-1] if decisions[-1].launches else decisions[0]
    return replace(taken, before=tuple(rejected))
