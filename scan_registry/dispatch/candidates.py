"""What there is to choose from: candidates, each a variant for a target, from an archive or from a compiler.

A candidate is cheap to make and tells how good it would be; whether it is of use is found by checking it.
Selection checks those that rank first, until one is; whoever asks for reasons has all of them checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
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
from scan_registry.dispatch.rows import TuningMatch, nearest_row
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Family, Kernel, Language, Launch, Problem, Variant

Backend = Literal["auto", "cuda", "triton", "reference"]
Key = tuple[str, str]
BACKENDS: tuple[Backend, ...] = ("auto", "cuda", "triton", "reference")
#: In order of preference on one tier.
LANGUAGES: tuple[Language, ...] = ("cuda", "triton")
MOST_BLOCKS = 2**31 - 1  # along x, on every GPU


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
class Request:
    """What selection answers: the best way to solve ``problem``, on no worse tier than ``lowest``."""

    system: System
    family: Family
    problem: Problem
    backend: Backend
    lowest: Tier


@dataclass(frozen=True)
class Match:
    """Something that solves the problem on the device.

    archive and binary are None where nothing has been compiled yet (jit); the variant and its
    target, too, for the reference. ``cost`` is the spec's estimate: smaller is better. It decides
    where nothing is ``tuned``, or among variants that the row does not name; ``ms`` is what the
    variant counts as by that row, if it does: see ``TuningMatch.ms``. ``launch`` is how a kernel starts.
    """

    tier: Tier
    variant: Variant | None = None
    target: Target | None = None
    archive: Archive | None = None
    binary: Binary | None = None
    cost: float = 0.0
    tuned: TuningMatch | None = None
    ms: float | None = None
    launch: Launch | None = None

    @property
    def subject(self) -> str:
        return f"{self.variant} for {self.target}" if self.variant else "the reference"

    @property
    def key(self) -> Key:
        """What it is and where it comes from."""
        return self.subject, str(self.archive.path) if self.archive else "here"

    @property
    def order(self) -> tuple[int, int, int, bool, float]:
        """Tier first, CUDA before Triton, the latest architecture, then what tuning found to be the
        fastest, then the spec's preference."""
        if self.variant is None or self.target is None:
            return self.tier, 0, 0, False, 0.0
        other = LANGUAGES.index(self.variant.language)
        preference = self.cost if self.ms is None else self.ms
        return self.tier, other, -self.target.number, self.ms is None, preference


@dataclass(frozen=True)
class Rejected:
    """What was not taken, and the reason. ``damaged`` marks an archive that is not intact."""

    subject: str
    reason: str
    damaged: bool = False


@dataclass(frozen=True)
class Candidate:
    """A variant for a target; ``entry`` and ``archive`` are None where it would be compiled here. ``tuned``
    and ``ms`` are those of a match. ``kernel`` is None if this version has none of its name."""

    kernel: Kernel | None
    text: str
    tier: Tier
    target: Target
    tuned: TuningMatch | None
    ms: float | None
    made: Variant | None = None
    archive: Archive | None = None
    entry: Entry | None = None

    @property
    def subject(self) -> str:
        return f"{self.text} for {self.target}"

    @property
    def rank(self) -> tuple[int, int, bool, float]:
        """The order of matches of one language, but for the spec's preference."""
        return self.tier, -self.target.number, self.ms is None, self.ms or 0.0


# --- Making candidates ------------------------------------------------------------------------


def candidates(
    request: Request, language: Language, *, all_dtypes: bool = False, installed: bool = False
) -> Iterator[Candidate | Rejected]:
    """Everything in one language, from the closest tier down, and what is rejected as a whole. Of
    archives, what is for other dtypes than the problem's remains unread unless ``all_dtypes``; with
    ``installed``, nothing that would be compiled here."""
    system, device = request.system, request.system.device
    if device is None:
        return
    try:
        kernel = request.family.kernel(request.problem.kernel, language)
    except KeyError:
        kernel = None
    tuned = _row(request, device, kernel) if kernel else None
    dtype = None if all_dtypes else request.problem.dtype
    for archive in system.every_archive:
        label = f"{archive.provider}'s {archive.path.name}"
        try:
            if reason := archive.arch.misfit(device.capability):
                yield Rejected(label, reason)
                continue
            entries = archive.of(request.family.name, request.problem.kernel, language, dtype)
        except ArchiveError as error:
            yield Rejected(label, str(error), damaged=True)
            continue
        for entry in entries:
            yield _installed(archive, entry, device, kernel, tuned)
    if installed or system.toolchains is None or language not in system.toolchains:
        return
    target = _compiled_for(system.toolchains[language], language, device)
    if isinstance(target, str):
        yield Rejected(f"{language} compiled here", target)
        return
    for variant in _buildable(system, kernel, dtype, target) if kernel else ():
        text = str(variant)
        ms = _ms(kernel, tuned, text)
        yield Candidate(kernel, text, Tier.JIT, target, tuned, ms, variant)


def _row(request: Request, device: Device, kernel: Kernel) -> TuningMatch | None:
    """All of one language go by the same row, wherever they come from, so that their times can be compared."""
    system = request.system
    fitting = [a for a in system.archives if _is_fitting(a, device)]
    spec = system.toolchains is not None
    return nearest_row(device, system.tuned, fitting, spec, kernel, request.problem)


def _is_fitting(archive: Archive, device: Device) -> bool:
    try:
        return archive.arch.misfit(device.capability) is None
    except ArchiveError:
        return False  # it is among the reasons


def _ms(kernel: Kernel | None, tuned: TuningMatch | None, text: str) -> float | None:
    return None if kernel is None or tuned is None else tuned.ms(kernel, text)


def _installed(
    archive: Archive, entry: Entry, device: Device, kernel: Kernel | None, tuned: TuningMatch | None
) -> Candidate | Rejected:
    try:
        target = entry.target
    except ArchiveError as error:
        return Rejected(str(entry), str(error), damaged=True)
    ms = _ms(kernel, tuned, entry.text)
    tier = nearest_tier(target, device)
    return Candidate(kernel, entry.text, tier, target, tuned, ms, None, archive, entry)


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


def checked(request: Request, candidate: Candidate) -> Match | Rejected:
    """The match that the candidate makes, or why it makes none."""
    try:
        return _checked(request, candidate)
    except ArchiveError as error:
        return Rejected(candidate.subject, str(error), damaged=True)


def _checked(request: Request, candidate: Candidate) -> Match | Rejected:
    system, device, kernel, target = (
        request.system,
        request.system.device,
        candidate.kernel,
        candidate.target,
    )
    variant = candidate.made or (candidate.entry.variant if candidate.entry else None)
    assert device is not None
    assert variant is not None
    if reason := _refusal(request, device, candidate, variant):
        return Rejected(candidate.subject, reason)
    assert kernel is not None
    launch = kernel.launch(variant, request.problem, device.sm_count)
    if (blocks := launch.grid[0]) > MOST_BLOCKS:
        return Rejected(candidate.subject, f"{blocks} blocks; a grid holds {MOST_BLOCKS}")
    binary = candidate.entry.binary if candidate.entry else None
    if binary and (reason := system.denied.get(binary.sha256) or misfit(binary, device)):
        return Rejected(candidate.subject, reason)
    cost = kernel.cost(variant, request.problem)
    made = Match(
        candidate.tier,
        variant,
        target,
        candidate.archive,
        binary,
        cost,
        candidate.tuned,
        candidate.ms,
        launch,
    )
    return admitted(request, made)


def admitted(request: Request, match: Match) -> Match | Rejected:
    """The match, unless it is on too low a tier, or was tried and failed."""
    if match.tier > request.lowest:
        reason = f"tier {match.tier}; the policy allows none below {request.lowest}"
        return Rejected(match.subject, reason)
    if match.key in request.system.failed:
        return Rejected(match.subject, request.system.failed[match.key])
    return match


def _refusal(
    request: Request, device: Device, candidate: Candidate, variant: Variant
) -> str | None:
    """Why the variant may not, or does not, solve the problem."""
    if request.backend not in ("auto", variant.language):
        return not_requested(request.backend)
    if reason := denial(request.system.denied, candidate.kernel, candidate.text):
        return reason
    if request.system.pinned not in (None, variant):
        return f"{request.system.pinned} is pinned"
    if candidate.kernel is None:
        return f"this version has no such kernel in {variant.language}"
    return _unsolved(candidate.kernel, candidate, variant, request.problem, device)


def _unsolved(
    kernel: Kernel, candidate: Candidate, variant: Variant, problem: Problem, device: Device
) -> str | None:
    if candidate.made is None:
        if reason := kernel.mistakes(variant, problem):
            return reason
    elif not kernel.rules.serves(variant.statics, candidate.target):
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
