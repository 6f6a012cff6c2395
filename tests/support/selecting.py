"""Imaginary catalogues, and what selection makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from imaginary import FAMILY

from scan_registry.artifact.archive import Archive, Binary, Entry
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Backend, Candidate, Decision, System, select
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.model import Kernel, Variant
from scan_registry.kernels.tuning import Tuning

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]

KERNEL = "time_last_forward"
EVERY_CUDA = FAMILY.kernel(KERNEL, "cuda").variants
#: What there is machine code of, and PTX.
CODE = [v for v in FAMILY.kernel(KERNEL, "cuda").every if "reverse" not in dict(v.statics)]
CUDA = tuple(v for v in EVERY_CUDA if v in CODE)
TRITON = FAMILY.kernel(KERNEL, "triton").variants


def a_problem(time: int = 1024, dtype: str = "float32", alignment: int = 16) -> LinearScanProblem:
    """Forward, time contiguous, two batches of three channels."""
    strides = (*(Strides(0, 3 * time, time, 1),) * 3, Strides(0, 3, 1, 0))
    sizes = (1, 2, 3, time)
    return LinearScanProblem("forward", "time_last", dtype, dtype, *sizes, strides, alignment)


def in_memory(arch: str, binaries: Iterable[Binary], provider: str = "scan-registry") -> Archive:
    """An archive that was never on disk: selection looks at nothing but its entries."""
    target = Target.parse(arch)
    archive = InMemory(Path(provider) / f"{target.label}.scanreg", provider)
    archive.__dict__["binaries"] = tuple(binaries)
    return archive


def facts(binary: Binary) -> tuple[str, ...]:
    variant = binary.variant
    return variant.family, variant.kernel, variant.language, variant.text("dtype")


class InMemory(Archive):
    def of(
        self, family: str, kernel: str, language: str | None = None, dtype: str | None = None
    ) -> tuple[Entry, ...]:
        wanted = family, kernel, language, dtype
        return tuple(
            self._entry(b)
            for b in self.binaries
            if all(w in (None, f) for w, f in zip(wanted, facts(b), strict=True))
        )

    def _entry(self, binary: Binary) -> Entry:
        own = {**binary.to_json(), "chunk": 0, "offset": 0}
        variant, target = own.pop("variant"), own.pop("target")
        return Entry(variant, target, {}, json.dumps(own).encode(), str(self.path))

    def tunings(self, head: str) -> tuple[Tuning, ...]:
        return self.__dict__.get("tuned", {}).get(head, ())


def decide(
    device: Device | None,
    archives: Iterable[Archive] = (),
    problem: LinearScanProblem | None = None,
    backend: Backend = "auto",
    lowest: Tier = Tier.REFERENCE,
    **system: Any,
) -> Decision:
    there = System(device, tuple(archives), **system)
    return select(there, FAMILY, problem or a_problem(), backend, lowest)


def binary_of(winner: Candidate | None) -> Binary:
    assert winner is not None
    assert winner.binary is not None
    return winner.binary


def variant_of(winner: Candidate | None) -> Variant:
    assert winner is not None
    assert winner.variant is not None
    return winner.variant


def told(decision: Decision, subject: str) -> str:
    """The reasons given for everything that is called so, in one text; there must be one."""
    found = [loser.reason for loser in decision.rejected if subject in loser.subject]
    assert found, f"{subject} is not among {[loser.subject for loser in decision.rejected]}"
    return "\n".join(found)


def plain(variant: Variant) -> bool:
    """Whether it is for aligned problems in float32."""
    return (variant.text("dtype"), variant.text("access")) == ("float32", "aligned")


def like(kernel: Kernel, pins: dict[str, Any]) -> Variant:
    """The first of the kernel's variants that has these static parameters."""
    return next(v for v in kernel.every if pins.items() <= dict(v.statics).items())
