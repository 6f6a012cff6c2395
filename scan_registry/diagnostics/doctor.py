"""What an installation can do on a GPU, what is wrong with it, and what would let it do more.

Pure: it asks selection about systems that it is given, and about each with a remedy applied: only what helps is advised.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from scan_registry.artifact.archive import Archive, ArchiveError
from scan_registry.diagnostics.doctor_report import (
    Answer,
    Coverage,
    Finding,
    Installation,
    Severity,
)
from scan_registry.diagnostics.doctor_words import listed, outcome, wheel_for
from scan_registry.diagnostics.explanation_words import called, grouped
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier, Toolchain, dotted, nearest_tier
from scan_registry.dispatch.rows import Origin
from scan_registry.dispatch.select import Backend, Decision, Rejected, System, select
from scan_registry.dispatch.shipped import holds, targets_of
from scan_registry.hardware.device import SUPPORTED, Device, driver_text
from scan_registry.hardware.target import COMPILERS, OLDEST, RELEASED, CudaVersion, Target
from scan_registry.kernels.model import PLAIN_TORCH, Family, Language, Sample, Variant

Families = Mapping[str, Family]
#: Of what runs where no language is asked for; machine code is as it should be.
_SEVERITY: Mapping[Tier | None, Severity] = {
    Tier.PTX: "note",
    Tier.JIT: "warning",
    Tier.REFERENCE: "error",
    None: "error",
}
#: For kernels that no wheel holds: compiling them here is expected.
_SEVERITY_OF_LEFT: Mapping[Tier | None, Severity] = {Tier.JIT: "note"}
_MOST_REASONS = 8  # of one finding


# --- The installation -------------------------------------------------------------------------


def findings_of(there: Installation, devices: Iterable[Device] = ()) -> Iterator[Finding]:
    """What is wrong whatever the GPU. ``devices``: the GPUs that packages are for, if none is installed."""
    for provider in there.providers:
        about = f"{provider.name} {provider.version}"
        if provider.mismatch:
            text, _, remedy = provider.mismatch.partition("; ")
            yield Finding("error", about, f"{text}: every call on a GPU raises it", (remedy,))
        for archive in provider.archives:
            if archive.damage:
                yield Finding("error", about, archive.damage, (f"reinstall {provider.name}",))
    if not any(provider.archives for provider in there.providers):
        text = "no package with GPU kernels is installed"
        unknown = f"`pip install scan-registry-…`, of {', '.join(RELEASED)}, for your GPU"
        packages = tuple(dict.fromkeys(filter(None, map(_package, devices)))) or (unknown,)
        yield Finding("warning", f"scan-registry {there.version}", text, packages)
    if there.cache.unusable:
        about = f"cache folder {there.cache.folder}"
        private = "set SCAN_REGISTRY_CACHE to a folder that only you can write to"
        open_to_others = "go-w" in there.cache.unusable
        chmod = (f"chmod go-w {there.cache.folder}",) if open_to_others else ()
        text = f"{there.cache.unusable}: each process compiles anew what no archive brings"
        yield Finding("warning", about, text, (*chmod, private))


def _package(device: Device) -> str | None:
    """How to come by the package for a GPU; None if the GPU is too old for all of them."""
    if device.capability < OLDEST:
        return None
    return wheel_for(next(t for t in targets_of(device) if t.label in RELEASED), device)


# --- One GPU ----------------------------------------------------------------------------------


def coverage(
    there: System, families: Families, lowest: Tier, ordinal: int | None = None
) -> Coverage:
    """What every sample gets on the system's GPU, with no language asked for and with each."""
    assert there.device is not None
    answers = []
    tuned: dict[Origin, None] = {}
    for family, sample in _samples(families, there.device):
        decisions = {
            backend: select(there, family, sample.problem, backend, lowest)
            for backend in _backends(family, sample)
        }
        tiers = {backend: _tier(decision) for backend, decision in decisions.items()}
        winner = decisions["auto"].winner
        if winner and winner.tuned and winner.ms is not None:
            tuned[winner.tuned.origin] = None
        kernel = sample.problem.kernel
        answers.append(Answer(family.name, kernel, sample.dtype, sample.access, tiers, sample.size))
    return Coverage(there.device, ordinal, tuple(answers), tuple(tuned))


def _severity(tier: Tier | None, backend: str, left: bool, counts: bool) -> Severity:
    """Of what falls on a tier; ``left``: no wheel holds it; ``counts``: even then a call that raises is an error."""
    raises = tier is None and backend == "auto"
    if left and not (raises and counts):
        return _SEVERITY_OF_LEFT.get(tier, "warning")
    return _SEVERITY[tier] if backend == "auto" else "warning"


def lacks(
    coverage: Coverage,
    there: System,
    families: Families,
    lowest: Tier,
    *,
    without_exception: bool = False,
) -> Iterator[Finding]:
    """What falls below machine code on one GPU, why, and what would lift it.

    ``coverage`` is that of the same system. ``without_exception``: a call that raises is an error, even where no wheel holds its
    kernel and a compiler would make it.
    """
    samples = _samples(families, coverage.device)
    for backend in dict.fromkeys(b for answer in coverage.answers for b in answer.tiers):
        answers = {n: a for n, a in enumerate(coverage.answers) if backend in a.tiers}
        groups: dict[tuple[Tier | None, bool, bool], list[int]] = {}
        for number, answer in answers.items():
            if _worth_a_word(answer, backend):
                left = _is_left(coverage.device, *samples[number], backend)
                never = left and not _can_be_compiled(there, *samples[number], backend)
                groups.setdefault((answer.tiers[backend], left, never), []).append(number)
        for (tier, left, never), numbers in groups.items():
            group = _Group(there, backend, lowest, tier, tuple(samples[n] for n in numbers), never)
            kernels = listed([answers[n] for n in numbers], [*answers.values()])
            yield Finding(
                _severity(tier, backend, left, never or without_exception),
                coverage.name,
                f"{outcome(group.device, backend, tier)}{'; no wheel holds it' if left else ''}: {kernels}{group.stand_ins()}",
                tuple(dict.fromkeys(group.remedies())),
                group.reasons(),
            )


def _is_left(device: Device, family: Family, sample: Sample, backend: Backend) -> bool:
    """Whether no wheel for the device holds what solves the sample, so that only a compiler can help."""
    targets = targets_of(device)
    return device.capability >= OLDEST and not any(
        holds(target, family, sample.problem, backend, device.shared_memory_per_block)
        for target in targets
    )


def _can_be_compiled(there: System, family: Family, sample: Sample, backend: Backend) -> bool:
    """Whether a compiler makes what solves the sample on the system's GPU: some GPUs have too little shared memory for all variants."""
    assert there.device is not None
    made_by = Toolchain("of wheels", COMPILERS)
    everything = replace(
        there,
        device=replace(there.device, driver=max(there.device.driver, *SUPPORTED)),
        toolchains={"cuda": made_by, "triton": made_by},
    )
    return select(everything, family, sample.problem, backend, Tier.JIT).winner is not None


def _samples(families: Families, device: Device) -> list[tuple[Family, Sample]]:
    """The samples as calls pose them on the device."""
    memory = device.shared_memory_per_block
    return [
        (family, replace(s, problem=s.by_memory(memory)) if s.by_memory else s)
        for family in families.values()
        for s in family.samples
    ]


def _backends(family: Family, sample: Sample) -> Iterator[Backend]:
    yield "auto"
    for kernel in family.kernels:
        if kernel.name == sample.problem.kernel:
            yield kernel.language


def _tier(decision: Decision) -> Tier | None:
    return decision.winner.tier if decision.winner else None


def _worth_a_word(answer: Answer, backend: Backend) -> bool:
    """Whether to report it: less than machine code runs, or one language is missing and others are not."""
    if backend == "auto":
        return answer.tiers["auto"] in _SEVERITY
    return answer.tiers[backend] is None and _SEVERITY.get(answer.tiers["auto"]) != "error"


@dataclass(frozen=True)
class _Group:
    """Samples that end on one tier. ``never``: no compiler makes a kernel for them that the GPU runs."""

    system: System
    backend: Backend
    lowest: Tier
    tier: Tier | None
    samples: tuple[tuple[Family, Sample], ...]
    never: bool = False

    @property
    def device(self) -> Device:
        assert self.system.device is not None
        return self.system.device

    def stand_ins(self) -> str:
        """What runs in place of kernels, by family, where it is more than plain torch."""
        if self.tier is not Tier.REFERENCE or self.device.capability < OLDEST:
            return ""
        others = {f.name: f.stand_in for f, _ in self.samples if f.stand_in != PLAIN_TORCH}
        return "".join(f"; {name}: {stand_in}" for name, stand_in in others.items())

    def reasons(self) -> tuple[str, ...]:
        """Why none of the kernels that solve the problems runs: first reasons of variants, then reasons of whole
        archives and compilers. Empty if a kernel runs, or if the GPU is too old for all kernels."""
        if self.tier not in (None, Tier.REFERENCE) or self.device.capability < OLDEST:
            return ()
        losers: dict[Rejected, None] = {}
        for family, sample in self.samples:
            decision = select(self.system, family, sample.problem, self.backend, self.lowest)
            for loser in decision.rejected:
                if _concerns(loser, family, sample, self.backend):
                    losers[loser] = None
        ordered = sorted(losers, key=lambda loser: _variant(loser) is None)
        lines = [f"{called(group)}: {reason}" for reason, group in grouped(ordered).items()]
        if len(lines) > _MOST_REASONS:
            lines[_MOST_REASONS:] = ["and more, which `scan-registry explain` lists"]
        return tuple(lines)

    def remedies(self) -> Iterator[str]:
        """What would lift at least one of the samples: first what keeps to the policy."""
        device = self.device
        if device.capability < OLDEST:
            yield f"use a GPU of compute capability {dotted(OLDEST)} or later"
            return
        yield from self._drivers(device)
        yield from self._wheels(device)
        if self._better(system=replace(self.system, denied={})):
            yield (
                "install a release of the package that denies these binaries (see above) in which "
                "they are replaced"
            )
        if self._above(Tier.JIT) and not self.never:
            for language, toolchain in (self.system.toolchains or {}).items():
                if isinstance(toolchain, str) and self._in_language(language):
                    yield toolchain
        if self._better(lowest=Tier.REFERENCE):
            yield from self._permissions()

    def _in_language(self, language: Language) -> bool:
        """Whether one of the samples has a kernel in a language that is asked for."""
        return self.backend in ("auto", language) and any(
            kernel.language == language and kernel.name == sample.problem.kernel
            for family, sample in self.samples
            for kernel in family.kernels
        )

    def _permissions(self) -> Iterator[str]:
        """The strictest policy that leaves something for one of the samples."""
        for level, tier in policy.LEVELS.items():
            if self._better(lowest=tier):
                yield f"allow tier {tier}: {policy.VARIABLE}={level}"
                return

    def _drivers(self, device: Device) -> Iterator[str]:
        """The oldest driver with which as much runs as with the newest."""
        versions = {
            binary.oldest_driver
            for archive in _fitting(self.system.archives, device)
            for binary in archive.binaries
        }
        later = sorted(v for v in {*versions, *SUPPORTED} if v > device.driver)

        def with_driver(version: CudaVersion) -> System:
            return replace(self.system, device=replace(device, driver=version))

        if later and self._better(system=with_driver(later[-1])):
            best = [*self._winners(with_driver(later[-1]))]
            version = next(
                v for v in later if all(map(operator.eq, self._winners(with_driver(v)), best))
            )
            yield f"install {driver_text(version)}"

    def _wheels(self, device: Device) -> Iterator[str]:
        """Wheels to advise: the closest architecture's and PTX's, if not installed and if they hold a kernel of the samples."""
        there = {archive.arch for archive in _fitting(self.system.archives, device)}
        machine = False
        for target in targets_of(device):
            if target in there:
                machine |= not target.is_ptx
            elif machine and not target.is_ptx:
                continue
            elif self._above(nearest_tier(target, device)) and self._is_served(target):
                machine |= not target.is_ptx
                yield wheel_for(target, device)

    def _is_served(self, target: Target) -> bool:
        """Whether a wheel for the target holds what solves one of the samples."""
        return any(
            holds(target, family, sample.problem, self.backend, self.device.shared_memory_per_block)
            for family, sample in self.samples
        )

    def _above(self, tier: Tier) -> bool:
        """Whether ``tier`` is allowed and closer than what there is."""
        return tier <= self.lowest and (self.tier is None or tier < self.tier)

    def _winners(self, there: System) -> Iterator[str | None]:
        for family, sample in self.samples:
            winner = select(there, family, sample.problem, self.backend, self.lowest).winner
            yield winner.subject if winner else None

    def _better(self, system: System | None = None, lowest: Tier | None = None) -> bool:
        there, allowed = system or self.system, self.lowest if lowest is None else lowest
        now = len(Tier) if self.tier is None else self.tier
        for family, sample in self.samples:
            tier = _tier(select(there, family, sample.problem, self.backend, allowed))
            if tier is not None and tier < now:
                return True
        return False


def _fitting(archives: Iterable[Archive], device: Device) -> list[Archive]:
    """The intact archives for an architecture that the device runs, whatever its driver."""
    fitting = []
    for archive in archives:
        try:
            if archive.arch.misfit(device.capability) is None and archive.binaries:
                fitting.append(archive)
        except ArchiveError:
            continue  # a finding of its own
    return fitting


def _variant(loser: Rejected) -> Variant | None:
    """The variant that was not taken, unless it is an archive, a compiler or the reference."""
    try:
        return Variant.parse(loser.subject.rpartition(" for ")[0])
    except ValueError:
        return None


def _concerns(loser: Rejected, family: Family, sample: Sample, backend: Backend) -> bool:
    """Whether it would solve the problem, if it ran: not if its spec, or the call, rules it out."""
    variant = _variant(loser)
    if loser.subject.endswith(" compiled here"):
        return backend == "auto" or loser.subject.startswith(f"{backend} ")
    if variant is None:
        return loser.subject != "the reference" or backend == "auto"
    if backend not in ("auto", variant.language):
        return False
    try:
        kernel = family.kernel(variant.kernel, variant.language)
        return kernel.rules.accepts(variant, sample.problem) is None
    except KeyError:  # of another version, or with other static parameters: that is the reason
        return True
