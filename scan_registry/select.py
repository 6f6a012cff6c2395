"""Selection: which binary solves a problem on a device, and why the others do not.

Pure: everything it looks at is an argument, so any device, catalogue and problem can be asked about
on any machine. Dispatch and ``inspect`` alike read the :class:`Decision` it returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from scan_registry.archive import Archive, Binary
from scan_registry.device import Device
from scan_registry.kernels.model import Family, Problem
from scan_registry.target import Capability

Backend = Literal["auto", "cuda", "triton", "reference"]
MOST_BLOCKS = 2**31 - 1  # along x, on every GPU
#: What the kernels' instructions need.
OLDEST: Capability = (8, 0)
BACKENDS: tuple[Backend, ...] = ("auto", "cuda", "triton", "reference")


class Rung(IntEnum):
    """How close a binary is to the device; lower is closer."""

    EXACT = 0
    SAME_MAJOR = 1
    PTX = 2

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True)
class Candidate:
    """A binary that solves the problem on the device."""

    archive: Archive
    binary: Binary
    rung: Rung
    cost: float

    @property
    def order(self) -> tuple[int, int, int, float]:
        """Rung first, CUDA before Triton, the latest architecture, then the spec's preference."""
        language = int(self.binary.variant.language != "cuda")
        return self.rung, language, -self.binary.target.number, self.cost


@dataclass(frozen=True)
class Rejected:
    """A binary, or a whole archive, that was not taken, and the reason."""

    subject: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """The outcome: the winner, if any, and everything that lost."""

    device: Device
    problem: Problem
    winner: Candidate | None
    rejected: tuple[Rejected, ...]


class NoKernelError(RuntimeError):
    """No installed binary solves the problem on the device; the message lists what is installed."""


def rung_of(binary: Binary, device: Device) -> Rung | Rejected:
    """How close the binary is to the device, or why it does not run there."""
    subject = f"{binary.variant} for {binary.target}"
    if reason := binary.target.misfit(device.capability):
        return Rejected(subject, reason)
    threads = binary.block[0] * binary.block[1] * binary.block[2]
    if threads > device.threads_per_block:
        return Rejected(
            subject, f"{threads} threads per block; the device has {device.threads_per_block}"
        )
    shared = binary.dynamic_shared + (binary.static_shared or 0)
    if shared > device.shared_memory_per_block:
        return Rejected(
            subject,
            f"{shared} bytes of shared memory; the device has {device.shared_memory_per_block}",
        )
    if (binary.registers or 0) * threads > device.registers_per_block:
        return Rejected(
            subject,
            f"{(binary.registers or 0) * threads} registers per block; "
            f"the device has {device.registers_per_block}",
        )
    if binary.target.is_ptx:
        return Rung.PTX
    return Rung.EXACT if binary.target.capability == device.capability else Rung.SAME_MAJOR


def select(
    device: Device,
    archives: Iterable[Archive],
    family: Family,
    problem: Problem,
    backend: Backend = "auto",
) -> Decision:
    """The best binary for ``problem`` on ``device``.

    An archive for an architecture that the device cannot run is rejected as a whole, unread.
    """
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    for archive in archives:
        if reason := archive.arch.misfit(device.capability):
            rejected.append(Rejected(str(archive.path.name), reason))
            continue
        for binary in archive.binaries:
            variant = binary.variant
            if variant.family != family.name or variant.kernel != problem.kernel:
                continue
            subject = f"{variant} for {binary.target}"
            if backend not in ("auto", variant.language):
                rejected.append(Rejected(subject, f"backend={backend!r} was asked for"))
                continue
            kernel = family.kernel(variant.kernel, variant.language)
            if reason := kernel.accepts(variant, problem):
                rejected.append(Rejected(subject, reason))
                continue
            if (blocks := kernel.launch(variant, problem).grid[0]) > MOST_BLOCKS:
                rejected.append(Rejected(subject, f"{blocks} blocks; a grid holds {MOST_BLOCKS}"))
                continue
            rung = rung_of(binary, device)
            if isinstance(rung, Rejected):
                rejected.append(rung)
                continue
            candidates.append(Candidate(archive, binary, rung, kernel.cost(variant, problem)))
    candidates.sort(key=lambda candidate: candidate.order)
    for candidate in candidates[1:]:
        subject = f"{candidate.binary.variant} for {candidate.binary.target}"
        rejected.append(Rejected(subject, _outranked(candidate, candidates[0])))
    return Decision(device, problem, candidates[0] if candidates else None, tuple(rejected))


def _outranked(loser: Candidate, winner: Candidate) -> str:
    if loser.rung != winner.rung:
        return f"rung {loser.rung}; the winner's is {winner.rung}"
    if loser.binary.variant.language != winner.binary.variant.language:
        return f"{winner.binary.variant.language} comes first"
    if loser.binary.target != winner.binary.target:
        return f"{winner.binary.target} is closer to the device"
    return f"the spec prefers the winner ({winner.cost:g} against {loser.cost:g})"


def _advice(device: Device) -> str:
    if device.capability < OLDEST:
        return "The kernels need compute capability {}.{}: use a later GPU".format(*OLDEST)
    arch = device.arch.replace("_", "")
    return f"Install a scan-registry wheel that was built for {arch}, or with PTX (ptx80)"


def require(decision: Decision) -> Candidate:
    """The winner; ``NoKernelError`` says what was asked, what is installed and what to do."""
    if decision.winner is not None:
        return decision.winner
    reasons = sorted({f"{r.subject}: {r.reason}" for r in decision.rejected})
    listed = (
        "\n".join(f"  {reason}" for reason in reasons) or "  nothing: this wheel has no archives"
    )
    raise NoKernelError(
        f"no installed binary runs {decision.problem.kernel} on {decision.device.name} "
        f"({decision.device.arch}). Installed:\n{listed}\n"
        f"{_advice(decision.device)}, or pass backend='reference'."
    )
