"""Whether a problem is solved as it is posed, or on copies of its tensors: see ``Family.routes``.

Pure, as selection is. Dispatch and ``explain`` alike read the :class:`Decision`, whose route says which way was taken.
"""

from __future__ import annotations

from dataclasses import replace

from scan_registry.dispatch.candidates import fitting_archives
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.rows import timing_model
from scan_registry.dispatch.select import Backend, Decision, System, select
from scan_registry.kernels.model import Family, Problem, Route
from scan_registry.kernels.tuning import Model

#: How many times as fast as the problem's own kernel a route has to be by the estimates, which are rough.
FASTER = 1.5


def select_route(
    system: System,
    family: Family,
    problem: Problem,
    backend: Backend = "auto",
    lowest: Tier = Tier.REFERENCE,
) -> Decision:
    """The decision for a problem or, where one of the family's routes is estimated to be much faster, for that of its
    copies."""
    own = select(system, family, problem, backend, lowest)
    if system.device is None or system.pinned is not None or not own.launches:
        return own
    routes = family.routes(problem)
    model = _model(own) if routes else None
    least = None if model is None else _estimate(own, None, model)
    if model is None or least is None:
        return own
    best, least = own, least / FASTER
    for route in routes:
        decision = select(system, family, route.problem, backend, lowest)
        if not decision.launches or decision.taken().tier > own.taken().tier:
            continue
        ms = _estimate(decision, route, _model(decision) or _of_gpu(model))
        if ms is not None and ms < least:
            best, least = replace(decision, route=route), ms
    return best


def _model(decision: Decision) -> Model | None:
    """The timing model of the winner's kernel; None if there is none for this GPU."""
    device, kernel = decision.system.device, decision.taken().kernel
    if device is None or kernel is None:
        return None
    archives = fitting_archives(decision.system, device)
    return timing_model(device, archives, decision.system.toolchains is not None, kernel)


def _of_gpu(model: Model) -> Model:
    """What a kernel's model says of the GPU. A kernel without a model of its own may have an estimate by that."""
    return {"gpu": model.get("gpu", {})}


def _estimate(decision: Decision, route: Route | None, model: Model) -> float | None:
    """Milliseconds of the winner: by the row of this very problem, if there is one, or else an estimate; None if nothing is
    known of it."""
    device, winner = decision.system.device, decision.taken()
    if route is None and winner.rule == "row":
        return winner.ms
    if device is None or winner.kernel is None or winner.text is None:
        return None
    of = decision.family.estimate
    return of(model, winner.kernel, winner.text, decision.problem, route, device.sm_count)
