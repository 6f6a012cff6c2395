"""Selection: what solves a problem on a device, and why everything else does not.

Pure: everything it looks at is an argument, so any device, catalogue and problem can be asked about
on any machine. Dispatch, ``explain`` and ``doctor`` alike read the :class:`Decision` it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Literal

from scan_registry.archive import Archive, ArchiveError, Binary
from scan_registry.device import Device
from scan_registry.fit import (
    OLDEST,
    Rung,
    Toolchain,
    dotted,
    jit_driver,
    jit_target,
    misfit,
    nearest_rung,
)
from scan_registry.frozen import dataclass
from scan_registry.kernels.model import Family, Kernel, Language, Launch, Problem, Variant
from scan_registry.rows import Tuned, nearest_row
from scan_registry.target import FIRST_CUDA, CudaVersion, Target

Backend = Literal["auto", "cuda", "triton", "reference"]
Key = tuple[str, str]
MOST_BLOCKS = 2**31 - 1  # along x, on every GPU
_LATEST_DRIVER: CudaVersion = (999, 0)  # later than any there will be
BACKENDS: tuple[Backend, ...] = ("auto", "cuda", "triton", "reference")


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
    """Something that solves the problem on the device.

    archive and binary are None where nothing has been compiled yet (jit); the variant and its
    target, too, for the reference. ``cost`` is the spec's estimate: smaller is better. It decides
    where nothing is ``tuned``, or among variants that the row does not name; ``ms`` is the variant's
    time in that row, if it does.
    """

    rung: Rung
    variant: Variant | None = None
    target: Target | None = None
    archive: Archive | None = None
    binary: Binary | None = None
    cost: float = 0.0
    tuned: Tuned | None = None
    ms: float | None = None

    @property
    def subject(self) -> str:
        return f"{self.variant} for {self.target}" if self.variant else "the reference"

    @property
    def key(self) -> Key:
        """What it is and where it comes from."""
        return self.subject, str(self.archive.path) if self.archive else "here"

    @property
    def order(self) -> tuple[int, int, int, bool, float]:
        """Rung first, CUDA before Triton, the latest architecture, then what tuning found to be the
        fastest, then the spec's preference."""
        if self.variant is None or self.target is None:
            return self.rung, 0, 0, False, 0.0
        other = int(self.variant.language != "cuda")
        preference = self.cost if self.ms is None else self.ms
        return self.rung, other, -self.target.number, self.ms is None, preference


@dataclass(frozen=True)
class Rejected:
    """What was not taken, and the reason. ``damaged`` marks an archive that is not intact."""

    subject: str
    reason: str
    damaged: bool = False


@dataclass(frozen=True)
class Decision:
    """The outcome: the winner, if any, and everything that lost, in the order of consideration."""

    system: System
    family: Family
    problem: Problem
    backend: Backend
    lowest: Rung
    winner: Candidate | None
    rejected: tuple[Rejected, ...]

    @property
    def launches(self) -> bool:
        """Whether the winner is a kernel."""
        return self.winner is not None and self.winner.variant is not None

    def launch(self) -> Launch | None:
        """How the winner is launched; None where there is none or torch launches."""
        if self.winner is None or self.winner.variant is None:
            return None
        assert self.system.device is not None
        kernel = _kernel(self.family, self.winner.variant)
        multiprocessors = self.system.device.multiprocessors
        return kernel.launch(self.winner.variant, self.problem, multiprocessors)

    def taken(self) -> Candidate:
        """The winner; ``NoKernelError`` says what was asked, what there is and what to do."""
        if self.winner is not None:
            return self.winner
        reasons = dict.fromkeys(f"  {r.subject}: {r.reason}" for r in self.rejected)
        raise NoKernelError(
            f"nothing runs {self.problem.kernel} on {_where(self.system.device)}:\n"
            + "\n".join(reasons)
            + f"\n{advice(self)}"
        )


class NoKernelError(RuntimeError):
    """Nothing that is installed and allowed solves the problem; the message lists what lost."""


def select(
    system: System,
    family: Family,
    problem: Problem,
    backend: Backend = "auto",
    lowest: Rung = Rung.REFERENCE,
) -> Decision:
    """The best way to solve ``problem``, on no rung below ``lowest``.

    An archive for an architecture that the device cannot run is rejected as a whole, unread.
    """
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    for outcome in _outcomes(system, family, problem, backend):
        if isinstance(outcome, Rejected):
            rejected.append(outcome)
        elif outcome.rung > lowest:
            reason = f"rung {outcome.rung}; the policy allows none below {lowest}"
            rejected.append(Rejected(outcome.subject, reason))
        elif outcome.key in system.failed:
            rejected.append(Rejected(outcome.subject, system.failed[outcome.key]))
        else:
            candidates.append(outcome)
    candidates = _placed(system, family, problem, candidates)
    candidates.sort(key=lambda candidate: candidate.order)
    winner = candidates[0] if candidates else None
    for loser in candidates[1:]:
        rejected.append(Rejected(loser.subject, _outranked(loser, candidates[0])))
    return Decision(system, family, problem, backend, lowest, winner, tuple(rejected))


Outcome = Candidate | Rejected


def _outcomes(
    system: System, family: Family, problem: Problem, backend: Backend
) -> Iterator[Outcome]:
    """Everything there is, from the top of the ladder down."""
    if system.device is not None:
        for archive in system.every_archive:
            yield from _from_archive(system, system.device, archive, family, problem, backend)
        for language, toolchain in (system.toolchains or {}).items():
            yield from _from_source(
                system, system.device, language, toolchain, family, problem, backend
            )
    if backend in ("auto", "reference"):
        yield Candidate(Rung.REFERENCE)
    else:
        yield Rejected("the reference", _not_asked(backend))


def _from_archive(
    system: System,
    device: Device,
    archive: Archive,
    family: Family,
    problem: Problem,
    backend: Backend,
) -> Iterator[Outcome]:
    label = f"{archive.provider}'s {archive.path.name}"
    try:
        if reason := archive.arch.misfit(device.capability):
            yield Rejected(label, reason)
            return
        entries = archive.of(family.name, problem.kernel)
    except ArchiveError as error:
        yield Rejected(label, str(error), damaged=True)
        return
    known = family.by_text(problem.kernel)
    for entry in entries:
        try:
            variant = known.get(entry.text) or entry.variant
            cost = _cost(system, family, variant, entry.text, problem, backend)
            if isinstance(cost, str):
                yield Rejected(str(entry), cost)
                continue
            binary = entry.binary
        except ArchiveError as error:
            yield Rejected(str(entry), str(error), damaged=True)
            continue
        if reason := system.denied.get(binary.sha256) or misfit(binary, device):
            yield Rejected(str(entry), reason)
        else:
            rung = nearest_rung(binary.target, device)
            yield Candidate(rung, variant, binary.target, archive, binary, cost)


def _from_source(
    system: System,
    device: Device,
    language: Language,
    toolchain: Toolchain | str,
    family: Family,
    problem: Problem,
    backend: Backend,
) -> Iterator[Outcome]:
    label = f"{language} compiled here"
    if isinstance(toolchain, str):
        yield Rejected(label, toolchain)
        return
    target = jit_target(toolchain, language, device.capability)
    if isinstance(target, str):
        yield Rejected(label, target)
        return
    needed = jit_driver(toolchain, target)
    if needed > device.driver:
        reason = (
            f"what {toolchain.identity} makes for {target} needs a driver for CUDA "
            f"{dotted(needed)}; this one supports {dotted(device.driver)}"
        )
        yield Rejected(label, reason)
        return
    for kernel in family.kernels:
        if (kernel.name, kernel.language) != (problem.kernel, language):
            continue
        for variant in _buildable(system, kernel):
            text = str(variant)
            if not kernel.serves(variant, target.capability):
                reason = f"it is not for compute capability {dotted(target.capability)}"
                yield Rejected(f"{text} for {target}", reason)
                continue
            cost = _cost(system, family, variant, text, problem, backend)
            if isinstance(cost, str):
                yield Rejected(f"{text} for {target}", cost)
            else:
                yield Candidate(Rung.JIT, variant, target, cost=cost)


def _buildable(system: System, kernel: Kernel) -> tuple[Variant, ...]:
    """What may be compiled: what wheels hold, and anything that there can be if it is pinned."""
    pinned = system.pinned
    if pinned is not None and kernel.allows(pinned):
        return (pinned,)
    return kernel.variants


def _placed(
    system: System, family: Family, problem: Problem, candidates: list[Candidate]
) -> list[Candidate]:
    """The candidates with what tuning knows of them. All of one language go by the same row, wherever
    they come from, so that their times can be compared."""
    rows: dict[Language, Tuned | None] = {}
    placed = []
    for candidate in candidates:
        variant = candidate.variant
        if variant is None or system.device is None:
            placed.append(candidate)
            continue
        kernel = _kernel(family, variant)
        if variant.language not in rows:
            fitting = [a for a in system.archives if not a.arch.misfit(system.device.capability)]
            spec = system.toolchains is not None
            rows[variant.language] = nearest_row(
                system.device, system.tuned, fitting, spec, kernel, problem
            )
        row = rows[variant.language]
        ms = None if row is None else row.row.times.get(kernel.label(variant))
        placed.append(replace(candidate, tuned=row, ms=ms))
    return placed


def _cost(
    system: System, family: Family, variant: Variant, text: str, problem: Problem, backend: Backend
) -> float | str:
    """The spec's estimate for a variant that can and may solve the problem, or why it does not.
    ``text`` is what the variant prints as."""
    reason = _refusal(system, family, variant, text, problem, backend)
    return _kernel(family, variant).cost(variant, problem) if reason is None else reason


def _refusal(
    system: System, family: Family, variant: Variant, text: str, problem: Problem, backend: Backend
) -> str | None:
    if backend not in ("auto", variant.language):
        return _not_asked(backend)
    if reason := system.denied.get(text) or _unpinned(system, variant):
        return reason
    try:
        kernel = _kernel(family, variant)
    except KeyError:
        return f"this version has no such kernel in {variant.language}"
    if text not in kernel.by_text and (reason := kernel.mistakes(variant, problem)):
        return reason
    assert system.device is not None
    count = system.device.multiprocessors
    if reason := kernel.accepts(variant, problem) or kernel.crowds(variant, problem, count):
        return reason
    blocks = kernel.launch(variant, problem, count).grid[0]
    return f"{blocks} blocks; a grid holds {MOST_BLOCKS}" if blocks > MOST_BLOCKS else None


def _unpinned(system: System, variant: Variant) -> str | None:
    return None if system.pinned in (None, variant) else f"{system.pinned} is pinned"


def _kernel(family: Family, variant: Variant) -> Kernel:
    return family.kernel(variant.kernel, variant.language)


# --- Words ------------------------------------------------------------------------------------


def _not_asked(backend: Backend) -> str:
    return f"backend={backend!r} was asked for"


def _outranked(loser: Candidate, winner: Candidate) -> str:
    if loser.rung != winner.rung:
        return f"rung {loser.rung}; the winner's is {winner.rung}"
    assert loser.variant is not None
    assert winner.variant is not None
    if loser.variant.language != winner.variant.language:
        return f"{winner.variant.language} comes first"
    if loser.target != winner.target:
        return f"{winner.target} is closer to the device"
    if loser.variant == winner.variant and loser.archive and winner.archive:
        return f"{winner.archive.provider} has it, too"
    return _less_liked(loser, winner)


def _less_liked(loser: Candidate, winner: Candidate) -> str:
    if winner.ms is None:
        return f"the spec prefers the winner ({winner.cost:g} against {loser.cost:g})"
    if loser.ms is None:
        return "the nearest tuned problem's row names the winner, and not this"
    return f"tuning found the winner faster ({winner.ms:g} ms against {loser.ms:g})"


def _where(device: Device | None) -> str:
    return f"{device.name} ({device.arch})" if device else "the CPU"


def advice(decision: Decision) -> str:
    """What would lift the decision to a higher rung, in one sentence."""
    device = decision.system.device
    if device is None:
        return "The kernels need a CUDA device"
    if device.capability < OLDEST:
        return f"The kernels need compute capability {dotted(OLDEST)}: use a later GPU"
    text = ", or ".join(remedies(decision)) or "no wheel and no driver is known to help"
    return text[0].upper() + text[1:]


def remedies(decision: Decision) -> Iterator[str]:
    """Each of which would lift the decision, as far as what there is can tell."""
    system, device = decision.system, decision.system.device
    assert device is not None
    rung = decision.winner.rung if decision.winner else len(Rung)
    latest = replace(system, device=replace(device, driver=_LATEST_DRIVER))
    later = select(latest, decision.family, decision.problem, decision.backend, decision.lowest)
    if later.winner and later.winner.rung < rung:
        needed = dotted(_driver_of(later.winner, system))
        yield f"update the GPU's driver to one that supports CUDA {needed}"
    if decision.backend != "reference":
        there = _targets(decision, device)
        wanted = []
        if device.capability in FIRST_CUDA and not any(
            target.capability == device.capability and not target.is_ptx for target in there
        ):
            wanted.append(f"built for {device.arch.replace('_', '')}")
        if decision.lowest >= Rung.PTX and rung > Rung.PTX and not any(t.is_ptx for t in there):
            wanted.append("with PTX (ptx80)")
        if wanted:
            yield f"install a scan-registry wheel {' or '.join(wanted)}"
    if decision.winner is None:
        allowed = select(system, decision.family, decision.problem, decision.backend).winner
        if allowed is not None:
            yield f"allow rung {allowed.rung}"


def _driver_of(winner: Candidate, system: System) -> CudaVersion:
    """The CUDA version that a driver has to support for it."""
    if winner.binary is not None:
        return winner.binary.oldest_driver
    assert winner.variant is not None
    assert winner.target is not None
    toolchain = (system.toolchains or {})[winner.variant.language]
    assert isinstance(toolchain, Toolchain)
    return jit_driver(toolchain, winner.target)


def _targets(decision: Decision, device: Device) -> set[Target]:
    """The architectures that the device runs and for which intact archives hold binaries of the
    kernel, in the language that was asked for."""
    found = set()
    for archive in decision.system.every_archive:
        try:
            if archive.arch.misfit(device.capability) is not None:
                continue
            held = archive.of(decision.family.name, decision.problem.kernel)
        except ArchiveError:
            continue  # it is among the reasons
        if any(decision.backend in ("auto", entry.language) for entry in held):
            found.add(archive.arch)
    return found
