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

from scan_registry.bench.baselines import Baseline, installed
from scan_registry.bench.cases import PASSES, Case
from scan_registry.bench.roofline import stream_calls
from scan_registry.bench.timing import (
    Call,
    Recording,
    compete,
    free_bytes,
    record,
    sets_of_inputs,
    streaming_bandwidth,
)
from scan_registry.dispatch.select import Backend, NoKernelError
from scan_registry.ops import plans
from scan_registry.ops.arguments import Options
from scan_registry.ops.linear_scan import linear_scan
from scan_registry.version import __version__

_TENSORS = 6  # of one call, while it is made: inputs, outputs, and what makes them


@dataclass(frozen=True)
class Timing:
    """Median and spread (largest minus smallest) of a call, in ms, by who made it; and in how many ms
    its bytes stream. ``roofline`` is the stream kernel's variant that measured that, on a GPU."""

    case: Case
    direction: str
    who: str
    ms: float
    spread: float
    roofline_ms: float
    roofline: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields; that of the variant only where there is one."""
        record = {**vars(self), "case": self.case.to_json()}
        return {name: value for name, value in record.items() if value is not None}


@dataclass(frozen=True)
class _Contender:
    who: str
    make: Callable[[], Call]  # prepares a call with inputs of its own
    captured: bool


@dataclass
class Bench:
    """Times cases on one device.

    backends  of this package, each of them timed
    baselines timed beside them, where they take the case
    skipped   who could not be timed, and why the first time; it grows
    """

    device: torch.device
    backends: Sequence[Backend]
    baselines: Sequence[Baseline] = ()
    passes: Sequence[str] = PASSES
    skipped: dict[str, str] = field(default_factory=dict)
    bandwidth: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    _broken: set[str] = field(default_factory=set)  # baselines that do not import

    @classmethod
    def on(
        cls,
        device: torch.device,
        backends: Sequence[Backend] | None = None,
        *,
        baselines: bool = True,
        passes: Sequence[str] = PASSES,
    ) -> Bench:
        """On a GPU both languages of this package and the installed baselines, on the CPU its kernels;
        measures what the device streams."""
        on_gpu = device.type == "cuda"
        usual: tuple[Backend, ...] = ("cuda", "triton") if on_gpu else ("auto",)
        others = tuple(installed()) if baselines and on_gpu else ()
        bench = cls(device, backends or usual, others, passes)
        with bench._current():
            bench.bandwidth = streaming_bandwidth(device)
            bench._tidy()
        return bench

    @property
    def name(self) -> str:
        """The GPU's name, or how many threads of the CPU take part."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"CPU, {torch.get_num_threads()} threads"

    def check_room(self, case: Case) -> None:
        """``ValueError`` if the case's tensors are more than the device has memory for."""
        takers = [baseline for baseline in self.baselines if not _refusal(baseline, case)]
        contenders = len(self.backends) + len(takers) + 1  # the roofline, or the CPU's scale
        traffics = map(case.traffic, self.passes)
        earlier = max((sets_of_inputs(each, self.device) - 1) * each for each in traffics)
        needed = contenders * (earlier + _TENSORS * case.tensor_bytes())
        free = free_bytes(self.device)
        if free is not None and needed > free:
            raise ValueError(
                f"T = {case.time} takes about {needed / 1e9:.1f} GB in {case.dtype}, and "
                f"{free / 1e9:.1f} GB are free on {self.device}"
            )

    def run(self, case: Case) -> None:
        """Time every pass of a case by everyone who takes it; ``NoKernelError`` if no kernel of this
        package does."""
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
        traffic = case.traffic(direction)
        recordings: dict[str, Recording] = {}
        missing: dict[str, str] = {}
        for contender in self._ours(case, direction):
            try:
                recordings[contender.who] = self._record(contender, traffic)
            except NoKernelError as error:
                missing[contender.who] = str(error)
        if not recordings:
            raise NoKernelError("\n".join(missing.values()))
        self.skipped = missing | self.skipped
        for contender in self._scale(case, direction):
            recordings[contender.who] = self._record(contender, traffic)
        for contender in self._theirs(case, direction):
            try:
                recordings[contender.who] = self._record(contender, traffic)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever another package's compilation or launch raises
                self._give_up(contender.who, error)
        rooflines = self._rooflines(case, direction)
        times = compete([*recordings.values(), *rooflines.values()])
        roofline_ms, roofline = traffic / self.bandwidth, None
        if rooflines:
            timed = zip(rooflines, times[len(recordings) :], strict=True)
            roofline, (roofline_ms, _) = min(timed, key=lambda each: each[1])
        for who, (ms, spread) in zip(recordings, times, strict=False):
            yield Timing(case, direction, who, ms, spread, roofline_ms, roofline)
        del recordings, rooflines
        self._tidy()

    def _rooflines(self, case: Case, direction: str) -> dict[str, Recording]:
        """What streams as many tensors of the same size, on a GPU."""
        if self.device.type != "cuda":
            return {}
        sets = sets_of_inputs(case.traffic(direction), self.device)
        moved = *case.moves(direction), case.tensor_bytes(), sets
        try:
            return {
                variant: record(calls, self.device)
                for variant, calls in stream_calls(*moved, self.device)
            }
        except NoKernelError as error:
            self.skipped.setdefault("the roofline, which torch.add stands in for", str(error))
            return {}

    def _tidy(self) -> None:
        """Give memory that nothing holds back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _record(self, contender: _Contender, traffic: int) -> Recording:
        calls = [contender.make() for _ in range(sets_of_inputs(traffic, self.device))]
        return record(calls, self.device, contender.captured)

    def _ours(self, case: Case, direction: str) -> Iterator[_Contender]:
        for backend in self.backends:
            name = "cpu" if self.device.type == "cpu" and backend == "auto" else backend

            def make(backend: Backend = backend) -> Call:
                return our_call(case, direction, backend, self.device)

            yield _Contender(f"scan-registry {name}", make, captured=backend != "reference")

    def _scale(self, case: Case, direction: str) -> Iterator[_Contender]:
        """On the CPU, where allocating a result has a price: what moves as many bytes, and allocates,
        too."""
        if self.device.type == "cpu" and direction == "forward":

            def make() -> Call:
                a, b = case.sequence(self.device), case.sequence(self.device)
                return lambda: torch.mul(a, b)

            yield _Contender("torch.mul", make, captured=True)

    def _theirs(self, case: Case, direction: str) -> Iterator[_Contender]:
        for baseline in self.baselines:
            if baseline.name in self._broken:
                continue
            if reason := _refusal(baseline, case):
                self.skipped.setdefault(baseline.name, reason)
                continue
            try:
                with _output_as_errors():
                    make = baseline.kernel_call(case, direction, self.device)
            except Exception as error:  # whatever another package's import raises
                self._give_up(baseline.name, error)
                continue
            if make is not None:
                yield _Contender(baseline.name, make, baseline.captured)

    def _give_up(self, baseline: str, error: Exception) -> None:
        self.skipped[baseline] = f"{type(error).__name__}: {error}"
        self._broken.add(baseline)

    def document(self) -> dict[str, Any]:
        """The stable form, as ``schemas/bench.json`` describes it: keys are only ever added."""
        return {
            "gpu": self.name if self.device.type == "cuda" else None,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "scan_registry": __version__,
            "streaming_bytes_per_ms": self.bandwidth,
            "timings": [timing.to_json() for timing in self.timings],
            "device": self.name,
            "skipped": dict(self.skipped),
        }


def our_call(case: Case, direction: str, backend: Backend, device: torch.device) -> Call:
    """A call of this package with inputs of its own: the operator forward, and backward what
    autograd calls."""
    gates, tokens, bounds = case.random_gates(device), case.sequence(device), case.bounds(device)

    def forward() -> Any:
        return linear_scan(gates, tokens, dim=case.dim, cu_seqlens=bounds, backend=backend)

    if direction == "forward":
        return forward
    states = forward()
    options, wanted = Options(case.dim, backend=backend), (True, True, False)
    return lambda: plans.backward(gates, states, tokens, None, None, bounds, options, wanted)


def _refusal(baseline: Baseline, case: Case) -> str | None:
    """Why a baseline does not take the case, or None: none of them takes options."""
    return f"it does not take {case.options}" if case.options else baseline.refuses(case)


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
