"""The tuner: on each problem, times every variant that is worth it, and the closest ones again.

Variants of one kernel and kind are compiled first, side by side. Then, problem by problem, all of them are timed
interleaved as CUDA graphs over the same inputs, which rotate out of the caches; few rounds tell which variants are
near the fastest, and more rounds which of those is the fastest. Before that, a variant is dropped if its results
differ from those of the variant that would run untuned, or if it takes several times as long as others. The one that
would run untuned always stays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from scan_registry.artifact.archive import Archive
from scan_registry.bench.timing import (
    LAUNCH_MS,
    Recording,
    compete,
    once,
    record,
    sets_of_inputs,
)
from scan_registry.diagnostics import accuracy
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import select
from scan_registry.hardware.device import Device
from scan_registry.hardware.driver import DriverError
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Variant
from scan_registry.kernels.tables import Measured, Run, Timing
from scan_registry.ops.benchmark import Call
from scan_registry.runtime import loader
from scan_registry.tuner.binaries import Obtained, obtain_all
from scan_registry.tuner.problems import Posed

NEAR = 1.1  # of the fastest's time: what is timed again
FAR = 3.0  # times the fastest's time, beyond what a launch takes: what leaves at once
COARSE = {"warm_up": 1, "rounds": 3}
FINE = {"warm_up": 2, "rounds": 11}
_ENOUGH_MS = 2.0  # of launches in a recording


@dataclass(frozen=True)
class TuningResult:
    """One problem, what was measured on it, and the label of what would have run untuned."""

    posed: Posed
    measured: Measured
    shipped: str | None

    @property
    def best(self) -> str:
        """The label of the fastest."""
        timings = self.measured.timings
        return min(timings, key=lambda label: (timings[label].ms, label))

    @property
    def best_ms(self) -> float:
        return self.measured.timings[self.best].ms

    @property
    def shipped_ms(self) -> float | None:
        """The time of what would have run untuned; None if that was not timed."""
        timing = self.measured.timings.get(self.shipped or "")
        return None if timing is None else timing.ms

    @property
    def regret(self) -> float | None:
        """The time of what would have run untuned over the fastest's; None if that was not timed."""
        return None if self.shipped_ms is None else self.shipped_ms / self.best_ms


@dataclass(frozen=True)
class _Launched:
    """Tensors of one launch, by the names of the kernel's pointers."""

    tensors: Mapping[str, Tensor | None]


@dataclass
class Tuner:
    """Tunes on one GPU, within ``budget`` seconds if there is one.

    archives  installed, from which variants are taken where they are there
    only      whether to time a variant; what would run untuned is timed all the same
    tell      is told in words what is being done
    keep      is called when all problems of a kind have been measured
    done      is called after each problem
    tuned     what was measured so far; it grows
    refused   variants that could not be timed, or that gave other results, and why; it grows
    left_out  problems that the budget, or an interruption, left no time for
    """

    ordinal: int
    device: Device
    archives: Sequence[Archive]
    run: Run
    budget: float | None = None
    only: Callable[[Variant], bool] = lambda variant: True
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    keep: Callable[[], object] = lambda: None
    done: Callable[[], object] = lambda: None
    clock: Callable[[], float] = time.monotonic
    tuned: list[TuningResult] = field(default_factory=list)
    refused: dict[Variant, str] = field(default_factory=dict)
    left_out: list[Posed] = field(default_factory=list)
    interrupted: bool = False
    _binaries: dict[Variant, Obtained] = field(default_factory=dict)

    @property
    def place(self) -> torch.device:
        """Where tensors are made."""
        return torch.device("cuda", self.ordinal)

    def tune(self, problems: Iterable[Posed]) -> None:
        """Measure all problems, one kind of one kernel after the other, in the order of their first
        problems. An interruption (Ctrl-C), or a GPU that fails, ends it as the end of the budget does: what
        has been measured stays."""
        groups: dict[tuple[str, str], list[Posed]] = {}
        for posed in problems:
            groups.setdefault(posed.place, []).append(posed)
        waiting = [posed for group in groups.values() for posed in group]
        started = self.clock()
        try:
            for group in groups.values():
                if self._late(started):
                    break
                self._compile(group)
                for posed in group:
                    if self._late(started):
                        break
                    self._measure(posed)
                    waiting.remove(posed)
                    self.done()
                self.keep()
        except KeyboardInterrupt:
            self.interrupted = True
            self.tell("interrupted; what was measured is kept")
        except RuntimeError as error:  # after an illegal access, say, nothing runs in this process
            reason = str(error).splitlines()[0]
            self.tell(f"{waiting[0]}: the GPU failed; what was measured is kept: {reason}")
        self.left_out += waiting

    def binaries(self, labels: Mapping[str, Iterable[str]]) -> list[Obtained]:
        """Those of all variants with these labels, by how their kernel's variants begin: of one label
        there may be several, one for each value of what a problem decides."""
        wanted: list[Variant] = []
        for kernel in {r.posed.kernel.head: r.posed.kernel for r in self.tuned}.values():
            named = set(labels.get(kernel.head, ()))
            served = (v for v in kernel.every if kernel.rules.serves(v.statics, self._target))
            wanted += [v for v in served if kernel.label(v) in named]
        self._obtain(wanted)
        return [self._binaries[variant] for variant in wanted if variant in self._binaries]

    @property
    def _target(self) -> Target:
        return Target(self.device.capability)

    def _wanted(self, posed: Posed) -> list[Variant]:
        return [variant for variant in posed.variants(self._target) if self.only(variant)]

    def _late(self, started: float) -> bool:
        return self.budget is not None and self.clock() - started > self.budget

    def _compile(self, group: Sequence[Posed]) -> None:
        head, kind = group[0].place
        variants = dict.fromkeys(v for posed in group for v in self._wanted(posed))
        started = self.clock()
        self._obtain(variants)
        ready = sum(variant in self._binaries for variant in variants)
        took = self.clock() - started
        self.tell(f"{head} {kind}: {ready} of {len(variants)} variants ready in {took:.1f} s")

    def _obtain(self, variants: Iterable[Variant]) -> None:
        missing = [v for v in variants if v not in self._binaries and v not in self.refused]
        for variant, obtained in obtain_all(self.device, self.archives, missing).items():
            if isinstance(obtained, str):
                self.refused[variant] = obtained
            else:
                self._binaries[variant] = obtained

    def _measure(self, posed: Posed) -> None:
        chosen = untuned(self.ordinal, posed)
        if chosen is not None:
            self._obtain([chosen])
        try:
            timings = self._timings(posed, chosen)
        except torch.OutOfMemoryError as error:
            self.tell(f"{posed}: left out, too large for this GPU: {str(error).splitlines()[0]}")
            self._tidy()
            self.left_out.append(posed)
            return
        self._tidy()
        if not timings:
            self.tell(f"{posed}: nothing could be timed")
            return
        shape = posed.shape.unweighted()
        measured = Measured(posed.kernel.head, str(posed), shape, timings, self.run)
        shipped = None if chosen is None else posed.kernel.label(chosen)
        self.tuned.append(TuningResult(posed, measured, shipped))
        self.tell(_words(self.tuned[-1]))

    def _timings(self, posed: Posed, chosen: Variant | None) -> dict[str, Timing]:
        """Of every variant that runs and agrees with what would run untuned, by label."""
        device = self.place
        traffic = posed.case.traffic(posed.direction)
        tolerance = accuracy.cases_of(posed.family.name).TOLERANCE[posed.case.dtype]
        sets = [posed.tensors(device) for _ in range(sets_of_inputs(traffic, device))]
        wanted = [v for v in self._wanted(posed) if v in self._binaries]
        if chosen in self._binaries and chosen not in wanted:
            wanted.append(chosen)
        wanted.sort(key=lambda variant: variant != chosen)  # it sets the standard
        expected: dict[str, Tensor] | None = None
        prepared: dict[str, list[Call]] = {}
        first: dict[str, float] = {}
        for variant in wanted:
            try:
                calls = self._calls(posed, variant, sets)
                results = _results(posed, calls[0], sets[0])
                if expected is None:
                    expected = results
                elif reason := _difference(results, expected, tolerance, posed.partial_sums):
                    self._distrust(variant, posed, reason)
                    continue
                label = posed.kernel.label(variant)
                prepared[label], first[label] = calls, once(calls[0], device)
            except (loader.UnfitError, DriverError) as error:
                self.refused[variant] = f"{posed}: {str(error).splitlines()[0]}"
        shipped = None if chosen is None else posed.kernel.label(chosen)
        limit = FAR * min(first.values(), default=0.0) + LAUNCH_MS
        recordings = {
            label: record(calls, device, enough=_ENOUGH_MS)
            for label, calls in prepared.items()
            if first[label] <= limit or label == shipped
        }
        left = {label: _timing(ms, 0.0, 1) for label, ms in first.items()}
        return left | _race(recordings, shipped)

    def _distrust(self, variant: Variant, posed: Posed, reason: str) -> None:
        """Exclude a variant that gave a wrong result once, for all problems."""
        self.refused[variant] = f"{posed}: {reason}"
        del self._binaries[variant]
        label = posed.kernel.label(variant)
        kept = []
        for result in self.tuned:
            timings = dict(result.measured.timings)
            if result.posed.kernel is posed.kernel:
                timings.pop(label, None)
            if timings:
                kept.append(replace(result, measured=replace(result.measured, timings=timings)))
        self.tuned[:] = kept

    def _calls(
        self, posed: Posed, variant: Variant, sets: Sequence[Mapping[str, Tensor | None]]
    ) -> list[Call]:
        """A launch on each set of tensors, of the very bytes that would be kept."""
        binary, content = self._binaries[variant]
        function = loader.load(self.ordinal, binary, lambda: content, binary)
        launch = loader.bind(self.ordinal, posed.family, posed.problem, binary, function)
        shape = posed.kernel.launch(variant, posed.problem, self.device.sm_count)
        return [
            partial(
                accuracy.start,
                self.ordinal,
                launch,
                posed.kernel,
                _Launched(tensors),
                shape.workspace,
            )
            for tensors in sets
        ]

    def _tidy(self) -> None:
        """Give memory that nothing holds back to the device."""
        torch.cuda.empty_cache()


def untuned(ordinal: int, posed: Posed) -> Variant | None:
    """What would run, were nothing tuned on this machine; None for the reference."""
    there = replace(loader.system(ordinal), tuned=None)
    decision = select(there, posed.family, posed.problem, posed.kernel.language, Tier.JIT)
    return decision.winner.variant if decision.winner else None


def _race(recordings: Mapping[str, Recording], shipped: str | None) -> dict[str, Timing]:
    """Time all variants in few rounds, then those near the fastest, and the shipped one, in more."""
    coarse = _times(recordings, COARSE)
    if not coarse:
        return {}
    limit = NEAR * min(timing.ms for timing in coarse.values())
    near = {
        label: recordings[label]
        for label, timing in coarse.items()
        if timing.ms <= limit or label == shipped
    }
    return coarse | _times(near, FINE)


def _times(recordings: Mapping[str, Recording], how: Mapping[str, int]) -> dict[str, Timing]:
    times = compete([*recordings.values()], **how) if recordings else []
    return {
        label: _timing(ms, spread, how["rounds"])
        for label, (ms, spread) in zip(recordings, times, strict=True)
    }


def _timing(ms: float, spread: float, rounds: int) -> Timing:
    """Rounded to the digits that are more than noise, as tables are long."""
    return Timing(float(f"{ms:.5g}"), float(f"{spread:.3g}"), rounds)


def _results(posed: Posed, call: Call, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Copies of what a call writes, over NaN."""
    for name in posed.outputs:
        out = tensors[name]
        assert out is not None
        out.fill_(torch.nan)
    call()
    outputs = {name: _there(tensors, name) for name in posed.outputs}
    return {
        name: out.sum(0) if name in posed.partial_sums else out.clone()
        for name, out in outputs.items()
    }


def _there(tensors: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = tensors[name]
    assert tensor is not None
    return tensor


def _difference(
    results: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    sums: Mapping[str, int],
) -> str | None:
    """What is wrong with results that should be alike: two right ones are each within tolerance, and a sum in float32 of n random
    terms that are added up one after the other is as exact as float32 times the square root of n."""
    for name, out in results.items():
        summed = torch.finfo(torch.float32).eps * sums.get(name, 0) ** 0.5
        error = _norm(out - expected[name]) / max(_norm(expected[name]), 1e-30)
        if not error <= 2 * (tolerance + summed):
            return f"its {name} differ from the shipped variant's by {error:.1e}"
    return None


def _norm(tensor: Tensor) -> float:
    """In float32 at least: of so many numbers a narrow sum would overflow."""
    dtype = tensor.dtype if tensor.element_size() >= 4 else torch.float32
    return float(torch.linalg.vector_norm(tensor, dtype=dtype).abs())


def _words(tuned: TuningResult) -> str:
    """One line of progress."""
    timings = tuned.measured.timings
    best = timings[tuned.best]
    regret = "nothing shipped" if tuned.regret is None else f"regret {tuned.regret:.3f}"
    tile = tuned.best.partition(tuned.posed.shape.kind)[2].lstrip(",") or tuned.best
    return (
        f"  {tuned.posed}, {tuned.posed.kernel.language}: {len(timings)} timed, best {best.ms:.4f} ms "
        f"({tile}), {regret}"
    )
