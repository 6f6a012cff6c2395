"""What ``scan-registry doctor`` reports: facts of the installation, what each GPU gets, and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scan_registry.diagnostics.first_calls import FirstCall, first_calls
from scan_registry.dispatch.fit import Tier, Toolchain
from scan_registry.dispatch.rows import Origin
from scan_registry.dispatch.select import Backend
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import CudaVersion
from scan_registry.kernels.model import Language

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """Something to know of.

    severity  "error" if a call falls to plain torch, or raises, because of it
    about     the GPU or the part of the installation
    remedies  each of which would help
    reasons   why what is closer to the GPU is ruled out
    """

    severity: Severity
    about: str
    text: str
    remedies: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What one sample gets, by backend; None where nothing runs. Languages without a kernel are left out."""

    family: str
    kernel: str
    dtype: str
    access: str
    tiers: Mapping[Backend, Tier | None]
    size: str = ""

    @property
    def pair(self) -> tuple[str, str]:
        """The dtype, and what else the sample stands for: a size, if that decides which GPUs have a kernel, else the access."""
        return self.dtype, self.size or self.access


@dataclass(frozen=True)
class Coverage:
    """One GPU, by its ordinal if it is here, and what every sample of every family gets on it.

    tuned    where the rows come from that samples go by; empty where the specs' estimates decide
    assumed  of a GPU that is not here, what was not said of it
    """

    device: Device
    ordinal: int | None
    answers: tuple[Answer, ...]
    tuned: tuple[Origin, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return title(self.device, self.ordinal)

    @property
    def first_calls(self) -> tuple[FirstCall, ...]:
        return first_calls(answer.tiers for answer in self.answers)


def title(device: Device, ordinal: int | None) -> str:
    """What tables and findings call a GPU."""
    prefix = "" if ordinal is None else f"cuda:{ordinal}, "
    return f"{prefix}{device.name} ({device.arch})"


@dataclass(frozen=True)
class ArchiveState:
    """An archive and what is wrong with it; ``binaries`` are those that are intact.

    One of a provider that does not go with this version is not read, and binaries is None.
    """

    arch: str
    path: str
    size: int | None
    binaries: int | None
    damage: str | None


@dataclass(frozen=True)
class ProviderState:
    """A package that brings archives. ``mismatch`` is why it does not go with this version."""

    name: str
    version: str
    core: str
    folder: str
    mismatch: str | None
    denied: Mapping[str, str]
    archives: tuple[ArchiveState, ...]


@dataclass(frozen=True)
class CacheState:
    """The JIT's cache folder: why it is not usable, what it holds, and bytes left on its disk."""

    folder: str
    unusable: str | None
    entries: int
    size: int
    free: int


@dataclass(frozen=True)
class Installation:
    """The facts, whatever the GPU. A version that is missing is None. ``cpu`` says why calls on the CPU fail, or None. ``for_jax``: torch
    is missing, and calls on JAX's arrays alone run."""

    python: str
    version: str
    torch: str | None
    jax: str | None
    driver: CudaVersion | None
    toolchains: Mapping[Language, Toolchain | str]
    providers: tuple[ProviderState, ...]
    cache: CacheState
    lowest: Tier
    cpu: str | None = None
    for_jax: bool = False


@dataclass(frozen=True)
class Report:
    """All that ``scan-registry doctor`` says. ``strict``: a machine without a GPU does not pass."""

    installation: Installation
    gpus: tuple[Coverage, ...]
    findings: tuple[Finding, ...]
    strict: bool = False

    @property
    def passed(self) -> bool:
        """Whether every call gets a kernel on every GPU; without one, whether calls on the CPU work."""
        usable = bool(self.gpus) or not (self.strict or self.installation.cpu)
        return usable and all(finding.severity != "error" for finding in self.findings)

    @property
    def first(self) -> Finding | None:
        """Of what can be helped, the finding that matters most: the first of the worst severity."""
        for severity in ("error", "warning"):
            for finding in self.findings:
                if finding.severity == severity and finding.remedies:
                    return finding
        return None
