"""Summary of random cases: the share of the bandwidth roofline that they reach, as a whole and by kind, and the cases
that reach the least."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from scan_registry.bench.targets import fastest
from scan_registry.ops.benchmark import Timing

NAMED = 10  # of the worst
ALL = "all"


@dataclass(frozen=True)
class Reached:
    """One pass over one case."""

    timing: Timing

    @property
    def ratio(self) -> float:
        return self.timing.ratio

    def to_json(self) -> dict[str, Any]:
        timing = self.timing
        return {
            "case": str(timing.case),
            "ratio": self.ratio,
            "ms": timing.ms,
            "roofline_ms": timing.roofline_ms,
        }


@dataclass(frozen=True)
class Shares:
    """All cases of one pass, the worst first."""

    direction: str
    shares: Sequence[Reached]

    @property
    def geometric_mean(self) -> float:
        return geometric_mean(share.ratio for share in self.shares)

    @property
    def tenth_percentile(self) -> float:
        """Between the two that are nearest, in proportion."""
        place = (len(self.shares) - 1) / 10
        below = int(place)
        low, high = (self.shares[n].ratio for n in (below, min(below + 1, len(self.shares) - 1)))
        return low + (place - below) * (high - low)

    @property
    def worst(self) -> Sequence[Reached]:
        """Up to ten."""
        return self.shares[:NAMED]

    def to_json(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "cases": len(self.shares),
            "geometric_mean": self.geometric_mean,
            "tenth_percentile": self.tenth_percentile,
            "worst": [reached.to_json() for reached in self.worst],
        }


def shares(timings: Iterable[Timing]) -> list[Shares]:
    """Of each pass that was timed, by this package's fastest."""
    by_direction: dict[str, list[Reached]] = {}
    for timing in fastest(timings).values():
        by_direction.setdefault(timing.direction, []).append(Reached(timing))
    return [
        Shares(direction, sorted(passes, key=lambda reached: reached.ratio))
        for direction, passes in by_direction.items()
    ]


@dataclass(frozen=True)
class KindShares:
    """The cases of one kind that were timed: how many, and the geometric mean of their shares in each pass."""

    kind: str
    cases: int
    means: Mapping[str, float]


def by_kind(timings: Iterable[Timing], kind: Callable[[Any], str]) -> list[KindShares]:
    """Of each kind in the order of their names, and last of all cases, by this package's fastest."""
    cases: dict[str, set[Any]] = {}
    ratios: dict[str, dict[str, list[float]]] = {}
    for (case, direction), timing in fastest(timings).items():
        for name in (kind(case), ALL):
            cases.setdefault(name, set()).add(case)
            ratios.setdefault(name, {}).setdefault(direction, []).append(timing.ratio)
    return [
        KindShares(name, len(cases[name]), {way: geometric_mean(r) for way, r in passes.items()})
        for name, passes in sorted(ratios.items(), key=lambda item: (item[0] == ALL, item[0]))
    ]
