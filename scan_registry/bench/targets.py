"""How close to the roofline the kernels are to be: cases, and the least share of the roofline's speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from scan_registry.bench.cases import Case
from scan_registry.bench.measure import Timing

_ALL, _TWO, _NARROW = ("float32", "bfloat16", "float16"), ("float32", "bfloat16"), ("bfloat16",)
_LONG = tuple(1 << n for n in range(10, 17))


@dataclass(frozen=True)
class PerformanceTarget:
    """In each pass, the roofline's time over the kernel's has to be at least ``ratio``."""

    case: Case
    ratio: float


@dataclass(frozen=True)
class Outcome:
    """A target in one pass, and what came of it."""

    target: PerformanceTarget
    timing: Timing

    @property
    def ratio(self) -> float:
        """The roofline's time over the kernel's."""
        return self.timing.roofline_ms / self.timing.ms

    @property
    def met(self) -> bool:
        return self.ratio >= self.target.ratio

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.target.case.to_json(),
            "direction": self.timing.direction,
            "who": self.timing.who,
            "target": self.target.ratio,
            "ratio": self.ratio,
            "met": self.met,
        }


def _targets() -> Iterator[PerformanceTarget]:
    def each(
        layout: str,
        shapes: Iterable[tuple[int, int, int]],
        dtypes: Sequence[str],
        ratio: float,
        **options: Any,
    ) -> Iterator[PerformanceTarget]:
        for dtype, (batch, channels, time) in product(dtypes, shapes):
            yield PerformanceTarget(Case(layout, batch, channels, time, dtype, **options), ratio)

    yield from each("time_last", [(8, 1536, t) for t in _LONG], _ALL, 0.95)
    yield from each("time_last", [(8, 1536, t) for t in (128, 256, 512)], _TWO, 0.88)
    for batch, channels in ((8, 1024), (4, 2048), (16, 512), (8, 1536)):
        shapes = [(batch, channels, t) for t in _LONG[:-1]]
        yield from each("channel_last", shapes, _ALL, 0.95)
    few = [(1, 1, 1 << 24), (1, 16, 1 << 20), (1, 64, 1 << 20)]
    yield from each("time_last", few, _TWO, 0.85)
    yield from each("channel_last", [(1, 16, 1 << 20), (1, 64, 1 << 17)], _TWO, 0.85)
    yield from each("channel_last", [(1, 2048, 8192), (2, 1024, 4096)], _NARROW, 0.80)
    yield from each("time_last", [(4096, 512, 64), (65536, 64, 16)], _TWO, 0.85)
    yield from each("time_last", [(3, 1537, 4099)], _TWO, 0.80)
    yield from each("channel_last", [(8, 1001, 4099)], _TWO, 0.80)
    yield from each("time_last", [(8, 512, 8192)], ("complex64", "float64"), 0.88)
    yield from each("channel_last", [(1, 1024, 1 << 20)], _NARROW, 0.88, sequences=64)
    yield from each("channel_last", [(8, 1024, 8192)], _NARROW, 0.90, gates="channel")


#: (batch, channels, time), whatever the layout; the quickest first, of which a budget covers the most.
TARGETS = tuple(sorted(_targets(), key=lambda target: target.case.tensor_bytes()))


def outcomes(targets: Sequence[PerformanceTarget], timings: Iterable[Timing]) -> list[Outcome]:
    """Of those targets whose cases were timed, in every pass that was: by this package's fastest."""
    best: dict[tuple[Case, str], Timing] = {}
    for timing in timings:
        key = timing.case, timing.direction
        ours = timing.who.startswith("scan-registry ")
        if ours and (key not in best or timing.ms < best[key].ms):
            best[key] = timing
    return [
        Outcome(target, timing)
        for target in targets
        for (case, _), timing in best.items()
        if case == target.case
    ]
