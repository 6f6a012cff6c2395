"""Selection: what solves a problem on a device, and why everything else does not.

Pure: everything it looks at is an argument, so any device, catalogue and problem can be asked about
on any machine. Dispatch, ``explain`` and ``doctor`` alike read the :class:`Decision` it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from scan_registry.artifact.archive import ArchiveError
from scan_registry.base.frozen import dataclass
from scan_registry.dispatch.candidates import (
    BACKENDS,
    MOST_BLOCKS,
    Backend,
    Candidate,
    Key,
    Rejected,
    System,
    admitted,
    candidates,
    checked,
    not_requested,
)
from scan_registry.dispatch.fit import Tier, Toolchain, dotted, jit_driver
from scan_registry.dispatch.shipped import can_be_built, holds
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import OLDEST, RELEASED, CudaVersion, Target
from scan_registry.kernels.model import LANGUAGES, Family, Language, Launch, Problem

__all__ = [
    "BACKENDS",
    "MOST_BLOCKS",
    "Backend",
    "Candidate",
    "Decision",
    "Key",
    "NoKernelError",
    "Rejected",
    "System",
    "advice",
    "remedies",
    "select",
]

_LATEST_DRIVER: CudaVersion = (999, 0)  # later than any there will be
(_PTX,) = (target for target in map(Target.parse, RELEASED) if target.is_ptx)


@dataclass(frozen=True)
class Decision:
    """What was asked, and the outcome: the winner, if there is one, and everything that lost.

    lowest   the worst tier that may run
    damaged  archives and binaries that were found to be damaged while the winner was looked for
    before   what was rejected for other problems of the same call, which were tried earlier (alternatives.py)
    """

    system: System
    family: Family
    problem: Problem
    backend: Backend
    lowest: Tier
    winner: Candidate | None
    damaged: tuple[Rejected, ...] = ()
    before: tuple[Rejected, ...] = ()

    @cached_property
    def rejected(self) -> tuple[Rejected, ...]:
        """Everything that lost, in the order of consideration. What would run, but is outranked, comes last. The
        first access looks at the whole catalogue."""
        unfit, outranked = self._lost
        own = (*unfit, *outranked)
        return tuple(dict.fromkeys((*self.before, *own))) if self.before else own

    @property
    def runner_up(self) -> Rejected | None:
        """What would run if the winner were not there."""
        _, outranked = self._lost
        return outranked[0] if outranked else None

    @cached_property
    def _lost(self) -> tuple[list[Rejected], list[Rejected]]:
        return _losers(self)

    @property
    def launches(self) -> bool:
        """Whether the winner is a kernel."""
        return self.winner is not None and self.winner.variant is not None

    def launch(self) -> Launch | None:
        """How the winner is launched; None where there is none or torch launches."""
        return None if self.winner is None else self.winner.launch

    def taken(self) -> Candidate:
        """The winner; ``NoKernelError`` says what was requested, what there is and what to do."""
        if self.winner is not None:
            return self.winner
        device = self.system.device
        where = f"{device.name} ({device.arch})" if device else "the CPU"
        reasons = dict.fromkeys(f"  {r.subject}: {r.reason}" for r in self.rejected)
        raise NoKernelError(
            f"nothing runs {self.problem.kernel} on {where}:\n"
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
    lowest: Tier = Tier.REFERENCE,
) -> Decision:
    """The best way to solve ``problem``, on no worse tier than ``lowest``.

    An archive for an architecture that the device cannot run is rejected as a whole, unread.
    """
    accepted, damaged = list[Candidate](), list[Rejected]()
    languages = _languages(system, family, problem)
    for language in languages:
        if backend in ("auto", language):
            # Languages come in order of preference. Once one has a candidate, what the JIT would compile in a later
            # language cannot win, so it is not listed. Once that candidate is EXACT, nothing in a later language can.
            there = [*candidates(system, family, problem, language, installed=bool(accepted))]
            best = _best(system, problem, there, lowest, damaged)
            accepted += [best] if best else []
            if best and best.tier == Tier.EXACT:
                break
    reference = _reference(system, backend, lowest)
    accepted += [reference] if isinstance(reference, Candidate) else []
    winner = min(accepted, key=lambda candidate: candidate.order_among(languages), default=None)
    return Decision(system, family, problem, backend, lowest, winner, tuple(dict.fromkeys(damaged)))


def _languages(system: System, family: Family, problem: Problem) -> tuple[Language, ...]:
    """In order of preference; without a GPU, none has candidates."""
    device = system.device
    return family.languages(problem, Target(device.capability)) if device else LANGUAGES


def _best(
    system: System,
    problem: Problem,
    there: Sequence[Candidate | Rejected],
    lowest: Tier,
    damaged: list[Rejected],
) -> Candidate | None:
    """The best candidate of one language that passes its checks; None if none does.

    Candidates are checked in their order. Among those that tuning has timed, the first that passes wins. Untimed ones
    of the same rank are all checked, and the one with the least cost wins: checking computes the spec's cost.
    Damaged archives and binaries that are found are added to ``damaged``.
    """
    damaged += [outcome for outcome in there if isinstance(outcome, Rejected) and outcome.damaged]
    ranked = sorted((c for c in there if isinstance(c, Candidate)), key=lambda c: c.order)
    for (*_, untimed, _), equals in groupby(ranked, key=lambda candidate: candidate.order):
        passing = []
        for candidate in equals:
            verdict = checked(system, problem, candidate, lowest)
            if isinstance(verdict, Candidate):
                passing.append(verdict)
                if not untimed:
                    break
            elif verdict.damaged:
                damaged.append(verdict)
        if passing:
            return min(passing, key=lambda candidate: candidate.order)
    return None


def _reference(system: System, backend: Backend, lowest: Tier) -> Candidate | Rejected:
    reference = Candidate(Tier.REFERENCE)
    if backend in ("auto", "reference"):
        return admitted(system, reference, lowest)
    return Rejected(reference.subject, not_requested(backend))


def _losers(decision: Decision) -> tuple[list[Rejected], list[Rejected]]:
    """Everything but the winner, each checked: first what cannot run, then what could, but is outranked."""
    system, problem, winner = decision.system, decision.problem, decision.winner
    outcomes, unfit, outranked = list[Candidate | Rejected](), list[Rejected](), list[Candidate]()
    # Archives that are rejected as a whole come up again for each language, and are listed once.
    whole = dict[Rejected, None]()
    languages = _languages(system, decision.family, problem)
    for language in languages:
        requested = decision.backend in ("auto", language)
        for candidate in candidates(system, decision.family, problem, language, all_dtypes=True):
            if isinstance(candidate, Rejected):
                if candidate not in whole:
                    whole[candidate] = None
                    outcomes.append(candidate)
            elif requested:
                outcomes.append(checked(system, problem, candidate, decision.lowest))
            else:
                outcomes.append(Rejected(candidate.subject, not_requested(decision.backend)))
    for outcome in (*outcomes, _reference(system, decision.backend, decision.lowest)):
        if isinstance(outcome, Rejected):
            unfit.append(outcome)
        elif winner is None or (outcome.key, outcome.binary) != (winner.key, winner.binary):
            outranked.append(outcome)
    outranked.sort(key=lambda candidate: candidate.order_among(languages))
    return unfit, [Rejected(c.subject, _outranked(c, winner)) for c in outranked if winner]


# --- Words ------------------------------------------------------------------------------------


def _outranked(loser: Candidate, winner: Candidate) -> str:
    if loser.tier != winner.tier:
        return f"tier {loser.tier}; the winner's is {winner.tier}"
    assert loser.variant is not None
    assert winner.variant is not None
    if loser.variant.language != winner.variant.language:
        return f"{winner.variant.language} comes first for such problems"
    if loser.target != winner.target:
        return f"{winner.target} is closer to the device"
    if loser.variant == winner.variant and loser.archive and winner.archive:
        return f"{winner.archive.provider} has it, too"
    return _less_liked(loser, winner)


def _less_liked(loser: Candidate, winner: Candidate) -> str:
    if winner.ms is None and winner.cost == loser.cost:
        return f"equal by the spec's estimate ({winner.cost:g}); the first in order is taken"
    if winner.ms is None:
        return f"the spec prefers the winner ({winner.cost:g} against {loser.cost:g})"
    if loser.ms is None:
        return "the nearest tuned problem's row names the winner, and not this"
    if winner.ms == loser.ms:
        return f"equal by the estimate ({winner.ms:g} ms); the first in order is taken"
    source = "the timing model estimates" if winner.rule == "timing_model" else "tuning found"
    return f"{source} the winner faster ({winner.ms:g} ms against {loser.ms:g})"


def advice(decision: Decision) -> str:
    """What would lift the decision to a better tier, in one sentence."""
    device = decision.system.device
    if device is None:
        return "The kernels need a CUDA device"
    if device.capability < OLDEST:
        return f"The kernels need compute capability {dotted(OLDEST)}: use a later GPU"
    text = ", or ".join(remedies(decision)) or "no wheel and no driver is known to help"
    return text[0].upper() + text[1:]


def remedies(decision: Decision) -> Iterator[str]:
    """What would lift the decision to a better tier, one by one, as far as the installed archives tell."""
    system, device = decision.system, decision.system.device
    assert device is not None
    tier = decision.winner.tier if decision.winner else len(Tier)
    latest = replace(system, device=replace(device, driver=_LATEST_DRIVER))
    later = select(latest, decision.family, decision.problem, decision.backend, decision.lowest)
    if later.winner and later.winner.tier < tier:
        needed = dotted(_driver_of(later.winner, system))
        yield f"update the GPU's driver to one that supports CUDA {needed}"
    if wheels := [*_helpful_wheels(decision, device, tier)]:
        yield f"install a scan-registry wheel {' or '.join(wheels)}"
    if decision.winner is None:
        allowed = select(system, decision.family, decision.problem, decision.backend).winner
        if allowed is not None:
            yield f"allow tier {allowed.tier}"


def _helpful_wheels(decision: Decision, device: Device, tier: int) -> Iterator[str]:
    """Which wheels hold the kernel for the device at a better tier than ``tier``."""
    if decision.backend == "reference":
        return
    there = _targets(decision, device)
    own, call = Target(device.capability), (decision.family, decision.problem, decision.backend)
    has_own = any(t.capability == own.capability and not t.is_ptx for t in there)
    if can_be_built(own) and not has_own and holds(own, *call):
        yield f"built for {own.label}"
    allows_ptx = decision.lowest >= Tier.PTX and tier > Tier.PTX
    if allows_ptx and not any(t.is_ptx for t in there) and holds(_PTX, *call):
        yield f"with PTX ({_PTX.label})"


def _driver_of(winner: Candidate, system: System) -> CudaVersion:
    """The CUDA version that a driver has to support for this candidate to run."""
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
    targets = set()
    for archive in decision.system.every_archive:
        try:
            if archive.arch.misfit(device.capability) is not None:
                continue
            entries = archive.of(decision.family.name, decision.problem.kernel)
        except ArchiveError:
            continue  # the damage is among the decision's reasons already
        if any(decision.backend in ("auto", entry.language) for entry in entries):
            targets.add(archive.arch)
    return targets
