"""GPU architectures: what code is compiled for, and on which devices it runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache

from scan_registry.base.frozen import dataclass

Capability = tuple[int, int]
CudaVersion = tuple[int, int]

#: The earliest compute capability whose instructions the kernels need.
OLDEST: Capability = (8, 0)
#: Capabilities of Tegra systems: machine code does not cross over between them and other GPUs.
TEGRA: frozenset[Capability] = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)})

#: The CUDA release that first knew each capability, in its compilers and in its drivers.
FIRST_CUDA: Mapping[Capability, CudaVersion] = {
    (7, 5): (10, 0),
    (8, 0): (11, 0),
    (8, 6): (11, 1),
    (8, 7): (11, 4),
    (8, 9): (11, 8),
    (9, 0): (11, 8),
    (10, 0): (12, 8),
    (10, 1): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}

#: The CUDA release of the compilers that make wheels; ci/matrix.json states it, too.
COMPILERS: CudaVersion = (12, 9)

#: What releases hold: machine code per GPU generation, and PTX for the rest. Each is in the default wheel,
#: and in a package of its own, such as scan-registry-sm90; ci/matrix.json describes them.
RELEASED = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "ptx80")

#: Bytes of shared memory that a block may have, as the CUDA C++ Programming Guide states of each capability.
SHARED_MEMORY: Mapping[Capability, int] = {
    (7, 0): 98_304,
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 1): 232_448,
    (10, 3): 232_448,
    (11, 0): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}

_TARGET = re.compile(r"(?P<kind>sm|compute|ptx)_?(?P<number>\d{2,3})(?P<suffix>[af]?)", re.ASCII)


@dataclass(frozen=True, order=True)
class Target:
    """What one binary was compiled for.

    ``sm_90`` is machine code for compute capability 9.0 and later minor versions of it, ``sm_90a``
    machine code for exactly 9.0, and ``compute_80`` PTX that a driver compiles for 8.0 and up.
    ``sm90``, ``compute80`` and ``ptx80`` parse too.
    """

    capability: Capability
    kind: str = "sm"
    suffix: str = ""

    @classmethod
    @cache
    def parse(cls, text: str) -> Target:
        """``ValueError`` if ``text`` is not an architecture."""
        match = _TARGET.fullmatch(text.strip().lower())
        if match is None:
            raise ValueError(f"{text!r} is not an architecture; expected one like sm90 or ptx80")
        number = int(match["number"])
        kind = "sm" if match["kind"] == "sm" else "compute"
        return cls(divmod(number, 10), kind, match["suffix"])

    def __str__(self) -> str:
        return f"{self.kind}_{self.number}{self.suffix}"

    @property
    def number(self) -> int:
        """90 for compute capability 9.0."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def is_ptx(self) -> bool:
        return self.kind == "compute"

    @property
    def shared_memory(self) -> float:
        """Bytes of shared memory that a block may have on the target's GPUs; infinite where that is unknown. PTX may run on any
        GPU from ``OLDEST`` on, so the least of these counts."""
        if self.is_ptx:
            return min(size for capability, size in SHARED_MEMORY.items() if capability >= OLDEST)
        return SHARED_MEMORY.get(self.capability, math.inf)

    @property
    def label(self) -> str:
        """The spelling in archive and package names: ``sm90``, ``ptx80``."""
        return f"{'ptx' if self.is_ptx else 'sm'}{self.number}{self.suffix}"

    def misfit(self, capability: Capability) -> str | None:
        """Why code for this target cannot run on a device, or None if it can."""
        here, there = (".".join(map(str, pair)) for pair in (self.capability, capability))
        if self.is_ptx:
            return (
                None
                if capability >= self.capability
                else f"{self} needs {here} or later, not {there}"
            )
        if self.capability == capability:
            return None
        if self.suffix == "a":
            return f"{self} runs on {here} only; the device is {there}"
        if TEGRA & {self.capability, capability}:
            return f"{self} and the device's {there} are on different sides of Tegra"
        if self.capability[0] != capability[0] or capability < self.capability:
            return f"{self} runs on {here} and later {here[:-2]}.x; the device is {there}"
        return None
