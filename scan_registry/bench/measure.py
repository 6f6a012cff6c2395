"""Times of whole cases: by this package and by the baselines that are installed here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import torch

from scan_registry.bench.roofline import stream_calls
from scan_registry.bench.timing import (
    LAUNCHES,
    ROUNDS,
    WARM_UP,
    Recording,
    compete,
    free_bytes,
    record,
    sets_of_inputs,
    streaming_bandwidth,
)
from scan_registry.dispatch.select import NoKernelError
from scan_registry.ops.benchmark import Baseline, Benchmark, Call, Case, Timing
from scan_registry.version import __version__

_TENSORS = 6  # of one call, while it is made: inputs, outputs, and what makes them


@dataclass(frozen=True)
class Effort:
    """How carefully a case is timed.

    enough    ms of calls in a recording, about; None: as usual
    launches  that a recording has on a GPU, at least
    cached    the share of a GPU's memory that may stay in torch's cache from pass to pass. Taking and giving back
              the memory of hundreds of small tensors takes longer than they are timed
    """

    enough: float | None = None
    launches: int = LAUNCHES
    warm_up: int = WARM_UP
    rounds: int = ROUNDS
    cached: float = 0.0


QUICK = Effort(enough=1.0, launches=1, warm_up=1, rounds=5, cached=0.4)


@dataclass
class Bench:
    """Times cases of one operator on one device.

    backends  of this package, each of them timed
    baselines timed beside them, where they take the case
    passes    of the benchmark's, those that are timed
    effort    how carefully each case is timed
    bandwidth bytes per ms that the device streams; 0 where the operator's kernels are not bound by that
    facts     what the benchmark measures before its cases
    skipped   who could not be timed, or on which case, and why the first time; it grows
    """

    benchmark: Benchmark
    device: torch.device
    backends: Sequence[str]
    baselines: Sequence[Baseline]
    passes: Sequence[str]
    effort: Effort = field(default_factory=Effort)
    skipped: dict[str, str] = field(default_factory=dict)
    bandwidth: float = 0.0
    facts: dict[str, float | None] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    _broken: set[str] = field(default_factory=set)  # baselines that do not import

    @classmethod
    def on(
        cls,
        benchmark: Benchmark,
        device: torch.device,
        backends: Sequence[str] | None = None,
        *,
        baselines: bool = True,
        passes: Sequence[str] | None = None,
        effort: Effort | None = None,
    ) -> Bench:
        """With the usual backends and the installed baselines; measures what the device streams, and what else
        the benchmark measures first."""
        usual = benchmark.backends[0 if device.type == "cuda" else 1]
        others = benchmark.baselines(device) if baselines else ()
        chosen = passes or benchmark.passes
        bench = cls(benchmark, device, backends or usual, others, chosen, effort or Effort())
        with bench._current():
            if benchmark.streams:
                bench.bandwidth = streaming_bandwidth(device)
            bench.facts.update(benchmark.calibrate(bench._ms, device))
            bench._tidy()
        return bench

    @property
    def name(self) -> str:
        """The GPU's name, or how many threads of the CPU take part."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"CPU, {torch.get_num_threads()} threads"

    def check_room(self, case: Case) -> None:
        """``ValueError`` if tensors to stream are more than the device has memory for."""
        takers = [baseline for baseline in self.baselines if not baseline.refusal(case)]
        contenders = len(self.backends) + len(takers) + 1  # the roofline, or the CPU's scale
        needed = 0
        for direction in self.passes:
            traffic, moved = case.traffic(direction), case.moves(direction)
            if moved is not None:
                earlier = (sets_of_inputs(traffic, self.device) - 1) * traffic
                needed = max(needed, earlier + _TENSORS * traffic // sum(moved))
        free = free_bytes(self.device)
        if free is not None and contenders * needed > free:
            raise ValueError(
                f"T = {case.time} takes about {contenders * needed / 1e9:.1f} GB in {case.dtype}, and "
                f"{free / 1e9:.1f} GB are free on {self.device}"
            )

    def make_room(self, case: Case) -> None:
        """The same, but of memory that torch has only cached as well."""
        try:
            self.check_room(case)
        except ValueError:
            self._tidy(fully=True)
            self.check_room(case)

    def run(self, case: Case) -> None:
        """Time every pass of a case by every backend and baseline that takes it; ``NoKernelError`` if none does."""
        with self._current():
            for direction in self.passes:
                self.timings += self._measure(case, direction)

    @contextmanager
    def _current(self) -> Iterator[None]:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                yield
        else:
            yield

    def _measure(self, case: Case, direction: str) -> Iterator[Timing]:
        recordings: dict[str, Recording] = {}
        missing: dict[str, str] = {}
        for backend in self.backends:
            who = self.benchmark.who(backend, self.device.type)
            try:
                recordings[who] = self._ours(case, direction, backend)
            except (NoKernelError, ValueError) as error:
                missing[f"{who}, {case}"] = str(error).strip().splitlines()[0]
        recordings |= self._theirs(case, direction)
        if not recordings:
            raise NoKernelError("\n".join(missing.values()))
        self.skipped = missing | self.skipped
        recordings |= self._scale(case, direction)
        rooflines = self._rooflines(case, direction)
        effort = self.effort
        everyone = [*recordings.values(), *rooflines.values()]
        times = compete(everyone, effort.warm_up, effort.rounds)
        roofline_ms = case.traffic(direction) / self.bandwidth if self.bandwidth else None
        roofline = None
        if rooflines:
            timed = zip(rooflines, times[len(recordings) :], strict=True)
            roofline, (roofline_ms, _) = min(timed, key=lambda pair: pair[1])
        for who, (ms, spread) in zip(recordings, times, strict=False):
            yield Timing(case, direction, who, ms, spread, roofline_ms, roofline)
        del recordings, rooflines, everyone
        self._tidy()

    def _ours(self, case: Case, direction: str, backend: str) -> Recording:
        def make() -> Call:
            return self.benchmark.call(case, direction, backend, self.device)

        return self._record(case, direction, make, captured=backend != "reference")

    def _theirs(self, case: Case, direction: str) -> Iterator[tuple[str, Recording]]:
        for baseline in self.baselines:
            if baseline.name in self._broken:
                continue
            if reason := baseline.refusal(case):
                self.skipped.setdefault(baseline.name, reason)
                continue
            try:
                with _output_as_errors():
                    make = baseline.kernel_call(case, direction, self.device)
            except Exception as error:  # whatever another package's import raises
                self.skipped[baseline.name] = _words(error)
                self._broken.add(baseline.name)
                continue
            if make is None:
                continue
            try:
                yield baseline.name, self._record(case, direction, make, baseline.captured)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever its compilation or launch raises
                self.skipped.setdefault(f"{baseline.name}, {case}", _words(error))

    def _scale(self, case: Case, direction: str) -> dict[str, Recording]:
        """The scale on the CPU, where allocating a result takes time: an operation that moves as many bytes and
        allocates its result."""
        moved = case.moves(direction)
        if self.device.type != "cpu" or direction != "forward" or moved is None:
            return {}
        dtype = getattr(torch, case.dtype)
        count = case.traffic(direction) // sum(moved) // dtype.itemsize

        def make() -> Call:
            a, b = (torch.randn(count, dtype=dtype) for _ in range(2))
            return lambda: torch.mul(a, b)

        return {"torch.mul": self._record(case, direction, make)}

    def _record(
        self, case: Case, direction: str, make: Callable[[], Call], captured: bool = True
    ) -> Recording:
        """Of calls with inputs that no cache holds. Where the memory is no bound, one set of inputs will do, and
        launches need not be recorded, as they take little of the time."""
        if case.moves(direction) is None:
            return record([make()], self.device, captured=False)
        sets = sets_of_inputs(case.traffic(direction), self.device)
        calls, effort = [make() for _ in range(sets)], self.effort
        return record(calls, self.device, captured, effort.enough, effort.launches)

    def _rooflines(self, case: Case, direction: str) -> dict[str, Recording]:
        """The kernels that read and write as many tensors of the same size, on a GPU."""
        moved, traffic = case.moves(direction), case.traffic(direction)
        if self.device.type != "cuda" or moved is None:
            return {}
        sets, effort = sets_of_inputs(traffic, self.device), self.effort
        try:
            return {
                variant: record(calls, self.device, True, effort.enough, effort.launches)
                for variant, calls in stream_calls(*moved, traffic // sum(moved), sets, self.device)
            }
        except NoKernelError as error:
            self.skipped.setdefault("the roofline, which torch.add stands in for", str(error))
            return {}

    def _ms(self, call: Call) -> float:
        """Of one call, whose launches are not recorded."""
        ((ms, _),) = compete([record([call], self.device, captured=False)])
        return ms

    def _tidy(self, *, fully: bool = False) -> None:
        """Give memory that nothing holds back to the device, unless a part of it may stay."""
        if self.device.type != "cuda":
            return
        kept = self.effort.cached * torch.cuda.get_device_properties(self.device).total_memory
        if fully or torch.cuda.memory_reserved(self.device) > kept:
            torch.cuda.empty_cache()

    def document(self) -> dict[str, Any]:
        """The stable form, as ``bench.json`` of the operator describes it: keys are only ever added."""
        streaming = {"streaming_bytes_per_ms": self.bandwidth} if self.benchmark.streams else {}
        return {
            "gpu": self.name if self.device.type == "cuda" else None,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "scan_registry": __version__,
            **streaming,
            **self.facts,
            "timings": [dict(self.benchmark.record(timing, self)) for timing in self.timings],
            "device": self.name,
            "skipped": dict(self.skipped),
        }


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


@contextmanager
def _output_as_errors() -> Iterator[None]:
    """What is printed meanwhile, by child processes too, goes to stderr: stdout is for results."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
