"""Whether a problem is solved as it is posed, or on copies of its tensors: see ``Family.route``.

Pure, as selection is. Dispatch and ``explain`` alike read the :class:`Decision`, whose route says which way was taken.
"""

from __future__ import annotations

from dataclasses import replace

from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Backend, Decision, System, select
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Family, Problem


def select_route(
    system: System, family: Family, problem: Problem, backend: Backend = "auto",
    lowest: Tier = Tier.REFERENCE,
) -> Decision:  # fmt: skip
    """The decision for a problem or, where the family poses it otherwise, for that of its copies, if a kernel of no worse tier
    solves that."""
    own = select(system, family, problem, backend, lowest)
    if system.device is None or system.pinned is not None or not own.launches:
        return own
    route = family.route(problem, Target(system.device.capability))
    if route is None:
        return own
    posed = select(system, family, route.problem, backend, lowest)
    if not posed.launches or posed.taken().tier > own.taken().tier:
        return own
    return replace(posed, route=route)
