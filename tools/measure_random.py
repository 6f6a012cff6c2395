"""How good the choice of a variant is on shapes that nobody tuned.

    python tools/measure_random.py --random 60 --seed 7 --budget 150 --out points.json
    python tools/measure_random.py --case time_last:12,900,700:bfloat16

It draws scans as ``scan-registry bench --random`` does. Of each it times, forward and backward, the variant that runs and
every other one that is installed and can run: those that take more than twice as long as the fastest leave at once,
those near it are timed more often. Every time goes into the file, which is written anew after each pass. Last it says
how much longer than the fastest the chosen variants take (the regret), and on which cases the most.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.bench.timing import (
    LAUNCH_MS,
    Recording,
    compete,
    once,
    sets_of_inputs,
    streaming_bandwidth,
    turn,
)
from scan_registry.diagnostics import accuracy
from scan_registry.dispatch import policy
from scan_registry.dispatch.candidates import Candidate, candidates, checked
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Decision, NoKernelError
from scan_registry.hardware.device import device
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import LANGUAGES
from scan_registry.ops.benchmark import Call
from scan_registry.ops.linear_scan_bench import Case
from scan_registry.ops.linear_scan_operator import OPERATOR
from scan_registry.ops.linear_scan_random import draw
from scan_registry.ops.operator import PASSES
from scan_registry.runtime import loader
from scan_registry.version import __version__

FAR, NEAR = 2.0, 1.15  # times the fastest's time: what leaves, and what is timed again
NAMED = 10  # of the worst
KEPT = 0.4  # the share of the memory that may stay in torch's cache between two passes


@dataclass(frozen=True)
class Point:
    """Median and spread of a variant's ms, of so many rounds; a spread of 0 after a single one."""

    ms: float
    spread: float
    rounds: int


@dataclass(frozen=True)
class Passed:
    """One pass over one case, and the times of the variants by what they print as."""

    case: Case
    direction: str
    chosen: str
    kind: str
    sizes: Mapping[str, float]
    points: Mapping[str, Point]
    refused: Mapping[str, str]

    @property
    def best(self) -> str:
        """The fastest; the chosen one if it is as fast."""
        return min(self.points, key=lambda text: (self.points[text].ms, text != self.chosen))

    @property
    def regret(self) -> float:
        """The chosen variant's time over the fastest's."""
        return self.points[self.chosen].ms / self.points[self.best].ms

    def to_json(self) -> dict[str, Any]:
        return {
            "case": str(self.case),
            "direction": self.direction,
            "bytes": self.case.traffic(self.direction),
            "kind": self.kind,
            "sizes": dict(self.sizes),
            "chosen": self.chosen,
            "best": self.best,
            "regret": self.regret,
            "points": [
                {"variant": text, "chosen": text == self.chosen, **vars(point)}
                for text, point in self.points.items()
            ],
            "refused": dict(self.refused),
        }


# --- What there is to time ---------------------------------------------------------------------


def decide(ordinal: int, case: Case, direction: str) -> Decision | None:
    """What runs the pass; None for what no kernel does. A kernel that sums up the gradient of broadcast gates comes
    before one that does not, as in the operator unless that is estimated to be much slower."""
    *fused, last = OPERATOR.posed(case, direction)
    for problem in (*fused, last):
        lowest = Tier.PTX if problem in fused else policy.lowest()
        try:
            decision = loader.decide(ordinal, FAMILY, problem, "auto", lowest)
        except NoKernelError:
            continue
        if decision.winner is not None and decision.winner.binary is not None:
            return decision
    return None


def installed(decision: Decision, languages: Sequence[str] = LANGUAGES) -> list[Candidate]:
    """What could run it, of the winner's tier, the winner first."""
    winner = decision.taken()
    found = {winner.text: winner}
    for language in LANGUAGES:
        if language not in languages:
            continue
        for each in candidates(
            decision.system, decision.family, decision.problem, language, installed=True
        ):
            if isinstance(each, Candidate) and each.tier == winner.tier:
                known = checked(decision.system, decision.problem, each, decision.lowest)
                if isinstance(known, Candidate):
                    found.setdefault(known.text, known)
    return list(found.values())


@dataclass(frozen=True)
class _Launched:
    """Tensors of one launch, by the names of the kernel's pointers."""

    tensors: Mapping[str, Any]


@dataclass
class Measuring:
    """Times passes on one GPU.

    languages  of the variants beside the chosen one
    clock      in seconds
    """

    ordinal: int
    languages: Sequence[str] = LANGUAGES
    clock: Callable[[], float] = time.monotonic
    _readers: dict[str, Callable[[Binary], bytes]] = field(default_factory=dict)

    @property
    def place(self) -> torch.device:
        """Where tensors are made."""
        return torch.device("cuda", self.ordinal)

    def measure(self, case: Case, direction: str) -> Passed | str:
        """The times of one pass, or why there are none."""
        decision = decide(self.ordinal, case, direction)
        if decision is None:
            return "no installed kernel runs it"
        problem, winner = decision.problem, decision.taken()
        sets = [
            _Launched(OPERATOR.tensors(case, problem, self.place))
            for _ in range(sets_of_inputs(case.traffic(direction), self.place))
        ]
        made: dict[str, list[Call]] = {}
        refused: dict[str, str] = {}
        for each in installed(decision, self.languages):
            assert each.text is not None
            try:
                made[each.text] = self._calls(each, problem, sets)
            except loader.UnfitError as error:
                refused[each.text] = str(error).splitlines()[0]
        if winner.text not in made:
            return f"the chosen variant does not load: {refused[str(winner.text)]}"
        points = race(made, str(winner.text), self.place)
        shape = winner.kernel.tunable.shape if winner.kernel else None
        place = shape(problem) if shape else None
        del made, sets
        self._tidy()
        return Passed(
            case,
            direction,
            str(winner.text),
            place.kind if place else "",
            place.sizes if place else {},
            points,
            refused,
        )

    def _calls(self, candidate: Candidate, problem: Any, sets: Sequence[_Launched]) -> list[Call]:
        """A launch on each set of tensors."""
        archive, binary, shape = candidate.archive, candidate.binary, candidate.launch
        assert archive is not None
        assert binary is not None
        assert shape is not None
        assert candidate.kernel is not None
        read = partial(self._reader(archive), binary)
        function = loader.load(self.ordinal, binary, read, binary)
        launch = loader.bind(self.ordinal, FAMILY, problem, binary, function)
        fixed = self.ordinal, launch, candidate.kernel
        return [partial(accuracy.start, *fixed, each, shape.workspace) for each in sets]

    def _reader(self, archive: Archive) -> Callable[[Binary], bytes]:
        """Of a whole archive, as nearly all of its binaries of the family are wanted."""
        return self._readers.setdefault(str(archive.path), archive.reader())

    def _tidy(self) -> None:
        """Give memory that nothing holds back to the device, where much is cached."""
        if self.place.type == "cuda":
            total = torch.cuda.get_device_properties(self.place).total_memory
            if torch.cuda.memory_reserved(self.place) > KEPT * total:
                torch.cuda.empty_cache()


def race(made: Mapping[str, Sequence[Call]], chosen: str, place: torch.device) -> dict[str, Point]:
    """Times of all; of those that are near the fastest, and of what is chosen, from more rounds."""
    found: dict[str, Point] = {}
    for text, calls in made.items():
        calls[0]()
        found[text] = Point(once(calls[0], place), 0.0, 1)
    limit = FAR * min(each.ms for each in found.values()) + LAUNCH_MS
    running = {
        text: turn(made[text], place)
        for text, each in found.items()
        if each.ms <= limit or text == chosen
    }
    for factor, warm_up, rounds in ((FAR, 1, 1), (NEAR, 0, 3), (NEAR, 0, 7)):
        times = _times(running, warm_up, rounds)
        found |= times
        limit = factor * min(each.ms for each in times.values())
        running = {
            text: recording
            for text, recording in running.items()
            if times[text].ms <= limit or text == chosen
        }
    return found


def _times(running: Mapping[str, Recording], warm_up: int, rounds: int) -> dict[str, Point]:
    times = compete([*running.values()], warm_up, rounds)
    return {
        text: Point(float(f"{ms:.5g}"), float(f"{spread:.3g}"), rounds)
        for text, (ms, spread) in zip(running, times, strict=True)
    }


# --- The tool ----------------------------------------------------------------------------------


def document(passed: Sequence[Passed], skipped: Mapping[str, str], facts: Any) -> dict[str, Any]:
    return {**facts, "passes": [each.to_json() for each in passed], "skipped": dict(skipped)}


def keep(path: Path, found: Mapping[str, Any]) -> None:
    """Write the file in one step, so that it is never there in part."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(found) + "\n", encoding="utf-8")
    unfinished.replace(path)


def report(passed: Sequence[Passed]) -> Iterator[str]:
    """Lines that say how large the regret is."""
    for direction in dict.fromkeys(each.direction for each in passed):
        here = sorted(
            (each for each in passed if each.direction == direction), key=lambda each: -each.regret
        )
        regrets = [each.regret for each in here]
        mean = math.exp(sum(map(math.log, regrets)) / len(regrets))
        yield (
            f"{direction}: regret of the choice on {len(here)} cases: geometric mean {mean:.3f}, mean "
            f"{sum(regrets) / len(regrets):.3f}, worst {regrets[0]:.3f}"
        )
        for each in here[:NAMED]:
            ms, best = each.points[each.chosen].ms, each.points[each.best].ms
            yield f"  {each.regret:.3f}  {ms:.4f} ms, best {best:.4f}, of {len(each.points)}  {each.case}"
            if each.best != each.chosen:
                yield f"         chosen {each.chosen}"
                yield f"         best   {each.best}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=60, metavar="N", help="cases; default: 60")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="default: 1")
    parser.add_argument(
        "--case", action="append", metavar="X", help="in place of random ones; may repeat"
    )
    parser.add_argument("--language", action="append", choices=LANGUAGES, help="may repeat")
    parser.add_argument("--fwd-only", action="store_true", help="the forward pass alone")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="begin no pass after so long"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("random-points.json"), metavar="FILE", help="for all times"
    )
    return parser.parse_args()


def measure_all(
    measuring: Measuring,
    cases: Sequence[Case],
    passes: Sequence[str],
    budget: float | None,
    save: Callable[[Sequence[Passed], Mapping[str, str]], object],
) -> tuple[list[Passed], dict[str, str]]:
    """The results that there was time for, and the reason for ending."""
    passed: list[Passed] = []
    skipped: dict[str, str] = {}
    begun = measuring.clock()
    waiting = [(case, direction) for case in cases for direction in passes]
    try:
        while waiting:
            if budget is not None and measuring.clock() - begun > budget:
                break
            case, direction = waiting[0]
            try:
                found = measuring.measure(case, direction)
            except torch.OutOfMemoryError as error:
                found = str(error).splitlines()[0]
                torch.cuda.empty_cache()
            waiting.pop(0)
            if isinstance(found, str):
                skipped[f"{case} {direction}"] = found
            else:
                passed.append(found)
            save(passed, skipped)
    except KeyboardInterrupt:
        print("interrupted: what was timed is kept", file=sys.stderr)
    except RuntimeError as error:  # after an illegal access, say, nothing runs in this process
        case, direction = waiting.pop(0)
        skipped[f"{case} {direction}"] = f"the GPU failed: {str(error).splitlines()[0]}"
    skipped |= {f"{case} {direction}": "not begun in time" for case, direction in waiting}
    save(passed, skipped)
    return passed, skipped


def main() -> int:
    args = _arguments()
    if not torch.cuda.is_available():
        print("tools/measure_random.py: error: it needs a GPU", file=sys.stderr)
        return 2
    cases = [Case.parse(text) for text in args.case or ()] or draw(args.random, args.seed)
    ordinal = torch.cuda.current_device()
    measuring = Measuring(ordinal, args.language or LANGUAGES)
    facts = {
        "gpu": device(ordinal).name,
        "arch": device(ordinal).arch,
        "sms": device(ordinal).sm_count,
        "scan_registry": __version__,
        "seed": None if args.case else args.seed,
        "streaming_bytes_per_ms": streaming_bandwidth(measuring.place),
    }
    begun = time.monotonic()

    def save(passed: Sequence[Passed], skipped: Mapping[str, str]) -> None:
        keep(args.out, document(passed, skipped, facts))

    passes = PASSES[: 1 if args.fwd_only else None]
    passed, skipped = measure_all(measuring, cases, passes, args.budget, save)
    for line in report(passed):
        print(line)
    for reason in dict.fromkeys(skipped.values()):
        names = [name for name, each in skipped.items() if each == reason]
        print(f"not timed: {len(names)} passes, such as {names[0]}: {reason}", file=sys.stderr)
    points = sum(len(each.points) for each in passed)
    print(f"{points} times in {time.monotonic() - begun:.0f} s, in {args.out}")
    return 0 if passed else 2


if __name__ == "__main__":
    sys.exit(main())
