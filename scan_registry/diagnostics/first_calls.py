"""What the first call of a process costs on each tier, as far as it has been measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Backend

#: The numbers are of ``python tests/stress/tiers.py``, whose record is tools/results/h200-tiers.json.
MEASURED_ON, DATE = "NVIDIA H200", "2026-11-23"
CALL = "linear_scan forward of (8, 1536, 2048) in float32"

#: By tier and language: milliseconds of the first call with all caches empty, and of the first call in
#: a process that finds in the caches what an earlier process left. Pairs that are missing were not
#: measured.
MEASURED: Mapping[tuple[Tier, str], tuple[float, float]] = {
    (Tier.EXACT, "cuda"): (3.79, 3.79),
    (Tier.PTX, "cuda"): (61.6, 7.18),
    (Tier.JIT, "cuda"): (293, 8.87),
    (Tier.JIT, "triton"): (960, 7.26),
    (Tier.REFERENCE, "torch"): (54.4, 51.7),
}


@dataclass(frozen=True)
class FirstCall:
    """Times of one tier in one language, where plain torch counts as a language. None if not
    measured."""

    tier: Tier
    language: str
    first_ms: float | None
    later_ms: float | None


def first_calls(tiers: Iterable[Mapping[Backend, Tier | None]]) -> tuple[FirstCall, ...]:
    """The first calls of all tiers in ``tiers``, closest tier first. ``tiers`` has the tier by backend,
    as in doctor's answers."""
    met: set[tuple[Tier, str]] = set()
    for by_backend in tiers:
        for backend, tier in by_backend.items():
            if tier is Tier.REFERENCE:
                met.add((tier, "torch"))
            elif tier is not None and backend != "auto":
                met.add((tier, backend))
    costs = []
    for tier, language in sorted(met):
        first, later = MEASURED.get((tier, language), (None, None))
        costs.append(FirstCall(tier, language, first, later))
    return tuple(costs)
