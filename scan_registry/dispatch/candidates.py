"""What there is to choose from: candidates, each a variant for a target, from an archive or from a compiler.

A candidate is cheap to make and tells how good it would be; whether it is of use is found by checking it.
Selection checks those that rank first, until one is; whoever asks for reasons has all of them checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Literal

from scan_registry.artifact.archive import Archive, ArchiveError, Binary, Entry
from scan_registry.base.frozen import dataclass
from scan_registry.dispatch.fit import (
    Tier,
    Toolchain,
    dotted,
    jit_driver,
    jit_target,
    misfit,
    nearest_tier,
)
from scan_registry.dispatch.rows import Rule, TuningMatch, nearest_row
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import (
    Family,
    Kernel,
    Language,
    Launch,
    Problem,
    Variant,
)

Backend = Literal["auto", "cuda", "triton", "reference"]
Key = tuple[str, str]
BACKENDS: tuple[Backend, ...] = ("auto", "cuda", "triton", "reference")
MOST_BLOCKS = 2**31 - 1, 65_535, 65_535  # on every GPU


@dataclass(frozen=True)
class System:
    """What there is to choose from, beside the problem.

    device      the GPU, or None for the CPU
    archives    compiled ahead of time, in order of preference among equals
    toolchains  by language the compiler here, or why there is none; None: not looked for, because
                what was compiled ahead of time comes first anyway
    denied      reasons why a binary, by its digest, or a variant must not run
    failed      reasons why what fits does not run here after all, by key: found out by trying
    tuned       what was tuned on this GPU, with its binaries; comes before the other archives
    pinned      the one variant that may run; None: any
    """

    device: Device | None
    archives: tuple[Archive, ...] = ()
    toolchains: Mapping[Language, Toolchain | str] | None = None
    denied: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[Key, str] = field(default_factory=dict)
    tuned: Archive | None = None
    pinned: Variant | None = None

    @property
    def every_archive(self) -> tuple[Archive, ...]:
        """In order of preference among equals."""
        return self.archives if self.tuned is None else (self.tuned, *self.archives)


@dataclass(frozen=True)
class Candidate:
    """A way to solve the problem: a variant for a target, from an archive or from a compiler; or the reference,
    which has neither. ``kernel`` is None, too, if this version has none of the variant's name.

    text      what the variant prints as
    archive   and ``entry``: None where it would be compiled here
    tuned     the row of tuning that all of its language go by, if there is one
    ms        what the variant counts as by that row, if it does: see ``TuningMatch.ms``
    variant   known once it is checked, or where it would be compiled here; so are the others below
    binary    None where nothing is compiled yet
    cost      the spec's estimate, smaller is better: it decides where nothing is ``tuned``, or among variants that
              the row does not name
    launch    how a kernel starts
    """

    tier: Tier
    text: str | None = None
    language: Language | None = None
    target: Target | None = None
    kernel: Kernel | None = None
    archive: Archive | None = None
    entry: Entry | None = None
    tuned: TuningMatch | None = None
    ms: float | None = None
    variant: Variant | None = None
    binary: Binary | None = None
    cost: float = 0.0
    launch: Launch | None = None

    @property
    def subject(self) -> str:
        return f"{self.text} for {self.target}" if self.text else "the reference"

    @property
    def rule(self) -> Rule | None:
        """What ``ms`` goes by; None where it is None."""
        if self.tuned is None or self.ms is None or self.kernel is None or self.text is None:
            return None
        return self.tuned.rule(self.kernel, self.text)

    @property
    def key(self) -> Key:
        """What it is and where it comes from."""
        return self.subject, str(self.archive.path) if self.archive else "here"

    @cached_property
    def order(self) -> tuple[int, int, bool, float]:
        """Among candidates of one language: tier first, the latest architecture, then what tuning found to be the
        fastest, then the spec's preference, which is 0 until it is checked."""
        if self.target is None:
            return self.tier, 0, False, 0.0
        preference = self.cost if self.ms is None else self.ms
        return self.tier, -self.target.number, self.ms is None, preference

    def order_among(self, languages: Sequence[Language]) -> tuple[int, int, int, bool, float]:
        """Among candidates of ``languages``, of which the earlier comes first on one tier."""
        tier, *others = self.order
        place = 0 if self.language is None else languages.index(self.language)
        return tier, place, *others  # type: ignore[return-value]


@dataclass(frozen=True)
class Rejected:
    """What was not taken, and the reason. ``damaged`` marks an archive that is not intact."""

    subject: str
    reason: str
    damaged: bool = False


# --- Making candidates ------------------------------------------------------------------------


def candidates(
    system: System,
    family: Family,
    problem: Problem,
    language: Language,
    *,
    all_dtypes: bool = False,
    installed: bool = False,
) -> Iterator[Candidate | Rejected]:
    """Everything in one language, from the closest tier down, and what is rejected as a whole. Of
    archives, what is for other dtypes than the problem's remains unread unless ``all_dtypes``; with
    ``installed``, nothing that would be compiled here."""
    device = system.device
    if device is None:
        return
    try:
        kernel = family.kernel(problem.kernel, language)
    except KeyError:
        kernel = None
    tuned = _row(system, device, kernel, problem) if kernel else None
    dtype = None if all_dtypes else problem.dtype
    for archive in system.every_archive:
        label = f"{archive.provider}'s {archive.path.name}"
        try:
            if reason := archive.arch.misfit(device.capability):
                yield Rejected(label, reason)
                continue
            entries = archive.of(family.name, problem.kernel, language, dtype)
        except ArchiveError as error:
            yield Rejected(label, str(error), damaged=True)
            continue
        for entry in entries:
            yield _installed(archive, entry, language, device, kernel, tuned)
    if installed or system.toolchains is None or language not in system.toolchains:
        return
    target = _compiled_for(system.toolchains[language], language, device)
    if isinstance(target, str):
        yield Rejected(f"{language} compiled here", target)
        return
    for variant in _buildable(system, kernel, dtype, target) if kernel else ():
        text = str(variant)
        ms = _ms(kernel, tuned, text)
        named = Tier.JIT, text, language, target, kernel, None, None, tuned, ms, variant
        yield Candidate(*named, None, 0.0, None)


def _row(system: System, device: Device, kernel: Kernel, problem: Problem) -> TuningMatch | None:
    """All of one language go by the same row, wherever they come from, so that their times can be compared."""
    fitting = fitting_archives(system, device)
    spec = system.toolchains is not None
    return nearest_row(device, system.tuned, fitting, spec, kernel, problem)


def fitting_archives(system: System, device: Device) -> list[Archive]:
    """Those for architectures that the device runs, in order of preference among equals."""
    return [archive for archive in system.archives if _is_fitting(archive, device)]


def _is_fitting(archive: Archive, device: Device) -> bool:
    try:
        return archive.arch.misfit(device.capability) is None
    except ArchiveError:
        return False  # it is among the reasons


def _ms(kernel: Kernel | None, tuned: TuningMatch | None, text: str) -> float | None:
    return None if kernel is None or tuned is None else tuned.ms(kernel, text)


def _installed(
    archive: Archive,
    entry: Entry,
    language: Language,
    device: Device,
    kernel: Kernel | None,
    tuned: TuningMatch | None,
) -> Candidate | Rejected:
    try:
        target = entry.target
    except ArchiveError as error:
        return Rejected(str(entry), str(error), damaged=True)
    ms = _ms(kernel, tuned, entry.text)
    tier = nearest_tier(target, device)
    named = tier, entry.text, language, target, kernel, archive, entry, tuned, ms
    return Candidate(*named, None, None, 0.0, None)  # of hundreds: without a look for defaults


def _compiled_for(toolchain: Toolchain | str, language: Language, device: Device) -> Target | str:
    """What a compiler makes for the device, or why there is nothing that it can."""
    if isinstance(toolchain, str):
        return toolchain
    target = jit_target(toolchain, language, device.capability)
    if isinstance(target, str):
        return target
    needed = jit_driver(toolchain, target)
    if needed > device.driver:
        return (
            f"what {toolchain.identity} makes for {target} needs a driver for CUDA "
            f"{dotted(needed)}; this one supports {dotted(device.driver)}"
        )
    return target


def _buildable(
    system: System, kernel: Kernel, dtype: str | None, target: Target
) -> tuple[Variant, ...]:
    """What may be compiled: what wheels hold, and anything that there can be if it is pinned."""
    pinned = system.pinned
    if pinned is not None and kernel.allows(pinned):
        return (pinned,)
    return kernel.variants if dtype is None else kernel.held(dtype, target)


# --- Checking one -----------------------------------------------------------------------------


def checked(
    system: System, problem: Problem, candidate: Candidate, lowest: Tier
) -> Candidate | Rejected:
    """The candidate with all that is known of it, or why it cannot or may not solve the problem here."""
    try:
        completed = _filled(system, problem, candidate)
    except ArchiveError as error:
        return Rejected(candidate.subject, str(error), damaged=True)
    if isinstance(completed, str):
        return Rejected(candidate.subject, completed)
    return admitted(system, completed, lowest)


def admitted(system: System, candidate: Candidate, lowest: Tier) -> Candidate | Rejected:
    """The candidate, unless it is on too low a tier, or was tried and failed."""
    reason = system.failed.get(candidate.key)
    if candidate.tier > lowest:
        reason = f"tier {candidate.tier}; the policy allows none below {lowest}"
    return candidate if reason is None else Rejected(candidate.subject, reason)


def _filled(system: System, problem: Problem, candidate: Candidate) -> Candidate | str:
    device, kernel, entry = system.device, candidate.kernel, candidate.entry
    variant = candidate.variant or (entry.variant if entry else None)
    assert device is not None
    assert variant is not None
    if reason := _refusal(system, candidate, variant):
        return reason
    if kernel is None:
        return f"this version has no such kernel in {variant.language}"
    if reason := _unsolved(kernel, candidate, variant, problem, device):
        return reason
    launch = kernel.launch(variant, problem, device.sm_count)
    if any(count > most for count, most in zip(launch.grid, MOST_BLOCKS, strict=True)):
        words = (" × ".join(map(str, sizes)) for sizes in (launch.grid, MOST_BLOCKS))
        return "{} blocks; a grid holds {}".format(*words)
    binary = entry.binary if entry else None
    if binary and (reason := system.denied.get(binary.sha256) or misfit(binary, device)):
        return reason
    cost = kernel.cost(variant, problem)
    return replace(candidate, variant=variant, binary=binary, cost=cost, launch=launch)


def _refusal(system: System, candidate: Candidate, variant: Variant) -> str | None:
    """Why the variant may not run."""
    if reason := denial(system.denied, candidate.kernel, str(candidate.text)):
        return reason
    return None if system.pinned in (None, variant) else f"{system.pinned} is pinned"


def _unsolved(
    kernel: Kernel, candidate: Candidate, variant: Variant, problem: Problem, device: Device
) -> str | None:
    """Why the variant does not solve the problem there."""
    if candidate.entry is not None:
        if reason := kernel.mistakes(variant, problem):
            return reason
    elif candidate.target and not kernel.rules.serves(variant.statics, candidate.target):
        shared, most = kernel.code.shared(variant), device.shared_memory_per_block
        if shared > most:
            return f"{shared} bytes of shared memory per block; the device has {most}"
        return f"it is not for {candidate.target}"
    return kernel.rules.accepts(variant, problem) or kernel.rules.exceeds_residency(
        variant, problem, device.sm_count
    )


def denial(denied: Mapping[str, str], kernel: Kernel | None, text: str) -> str | None:
    """Why a variant, given by what it prints as, must not run: a name without what the problem decides stands
    for all that differ in that alone."""
    general = f"{kernel.head}:{kernel.label_in(text)}" if kernel and denied else text
    return denied.get(text) or denied.get(general)


def not_requested(backend: Backend) -> str:
    return f"backend={backend!r} was asked for"
