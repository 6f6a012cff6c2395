"""Performance targets: which of them timings meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from scan_registry.ops.benchmark import OURS, PerformanceTarget, Timing


@dataclass(frozen=True)
class Outcome:
    """A target in one pass, and what came of it."""

    target: PerformanceTarget
    timing: Timing

    @property
    def ratio(self) -> float:
        return self.timing.ratio

    @property
    def met(self) -> bool:
        return self.ratio >= self.target.ratio

    def to_json(self) -> dict[str, Any]:
        return {
            **({"use": self.target.use} if self.target.use else {}),
            "case": self.target.case.to_json(),
            "direction": self.timing.direction,
            "who": self.timing.who,
            "target": self.target.ratio,
            "ratio": self.ratio,
            "met": self.met,
        }


@dataclass(frozen=True)
class Use:
    """What the cases of one use reach in one pass: how many there are, and the geometric mean and the least of their ratios."""

    name: str
    direction: str
    cases: int
    mean: float
    least: float


def uses(outcomes: Iterable[Outcome]) -> list[Use]:
    """Of those targets that have a use."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for outcome in outcomes:
        if outcome.target.use:
            key = outcome.target.use, outcome.timing.direction
            ratios.setdefault(key, []).append(outcome.ratio)
    return [Use(*key, len(r), geometric_mean(r), min(r)) for key, r in ratios.items()]


def fastest(timings: Iterable[Timing]) -> dict[tuple[Any, str], Timing]:
    """This package's fastest, by case and pass."""
    best: dict[tuple[Any, str], Timing] = {}
    for timing in timings:
        key = timing.case, timing.direction
        ours = timing.who.startswith(f"{OURS} ")
        if ours and (key not in best or timing.ms < best[key].ms):
            best[key] = timing
    return best


def outcomes(targets: Sequence[PerformanceTarget], timings: Iterable[Timing]) -> list[Outcome]:
    """Of those targets whose cases were timed, in every pass that was: by this package's fastest."""
    best = fastest(timings)
    return [
        Outcome(target, timing)
        for target in targets
        for (case, _), timing in best.items()
        if case == target.case
    ]
