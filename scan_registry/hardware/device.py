"""GPUs as selection sees them: a few numbers, so that any device can be described without one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from scan_registry.base.frozen import dataclass
from scan_registry.hardware.target import SHARED_MEMORY, Capability, CudaVersion

# Numbers of CUdevice_attribute.
_MAX_THREADS_PER_BLOCK = 1
_MAX_REGISTERS_PER_BLOCK = 12
_MULTIPROCESSOR_COUNT = 16
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


@dataclass(frozen=True)
class Device:
    """One GPU. Shared memory in bytes; ``driver`` is the CUDA version that its driver supports."""

    name: str
    capability: Capability
    sm_count: int
    shared_memory_per_block: int
    registers_per_block: int
    threads_per_block: int
    driver: tuple[int, int]

    @property
    def arch(self) -> str:
        """``sm_90`` for compute capability 9.0."""
        return "sm_{}{}".format(*self.capability)


#: SMs of the largest GPU of each capability.
_SM_COUNTS: Mapping[Capability, int] = {
    (7, 0): 80,
    (7, 5): 72,
    (8, 0): 108,
    (8, 6): 84,
    (8, 7): 16,
    (8, 9): 144,
    (9, 0): 132,
    (10, 0): 152,
    (10, 1): 20,  # Thor, as CUDA 12 calls it
    (10, 3): 152,
    (11, 0): 20,
    (12, 0): 188,
    (12, 1): 48,
}
#: CUDA versions that the branches of the Linux driver support, by the branch's first number.
_BRANCHES: Mapping[int, CudaVersion] = {
    450: (11, 0),
    455: (11, 1),
    460: (11, 2),
    465: (11, 3),
    470: (11, 4),
    495: (11, 5),
    510: (11, 6),
    515: (11, 7),
    520: (11, 8),
    525: (12, 0),
    530: (12, 1),
    535: (12, 2),
    545: (12, 3),
    550: (12, 4),
    555: (12, 5),
    560: (12, 6),
    565: (12, 7),
    570: (12, 8),
    575: (12, 9),
    580: (13, 0),
    590: (13, 1),
}

#: CUDA versions that one driver or another supports.
SUPPORTED = tuple(_BRANCHES.values())


def cuda_of_driver(text: str) -> CudaVersion:
    """(12, 9) for ``12.9`` and for driver ``575`` or ``575.57.08``; ``ValueError`` for anything else."""
    first, *rest = text.split(".")
    if not text.isascii() or not all(part.isdecimal() for part in (first, *rest)):
        raise ValueError(f"{text!r} is neither a CUDA version nor a driver's")
    number = int(first)
    if number < 100 and len(rest) == 1:
        return number, int(rest[0])
    known = [branch for branch in _BRANCHES if branch <= number]
    if number < 100 or not known:
        raise ValueError(
            f"{text!r} is neither a CUDA version such as 12.9 nor a driver's from {min(_BRANCHES)} on"
        )
    return _BRANCHES[max(known)]


def driver_text(version: CudaVersion) -> str:
    """``driver 575 or later, for CUDA 12.9``."""
    branch = {cuda: first for first, cuda in _BRANCHES.items()}.get(version)
    start = "a driver" if branch is None else f"driver {branch} or later,"
    return "{} for CUDA {}.{}".format(start, *version)


def described(
    capability: Capability,
    *,
    name: str | None = None,
    driver: CudaVersion | None = None,
    sm_count: int | None = None,
    shared_memory_per_block: int | None = None,
) -> Device:
    """A GPU that is not here, as far as its capability tells; a capability that is not known has the
    limits of the latest known one before it, and the driver is the latest known one unless given."""
    known = max((c for c in SHARED_MEMORY if c <= capability), default=min(SHARED_MEMORY))
    return Device(
        name=name or "a GPU of compute capability {}.{}".format(*capability),
        capability=capability,
        sm_count=sm_count or _SM_COUNTS[known],
        shared_memory_per_block=shared_memory_per_block or SHARED_MEMORY[known],
        registers_per_block=65_536,
        threads_per_block=1024,
        driver=driver or max(_BRANCHES.values()),
    )


@cache
def device(ordinal: int) -> Device:
    """The GPU that torch calls ``cuda:<ordinal>``. Needs a driver, creates no context."""
    from scan_registry.hardware import driver

    def read(number: int) -> int:
        return driver.attribute(ordinal, number)

    return Device(
        name=driver.device_name(ordinal),
        capability=(read(_CAPABILITY_MAJOR), read(_CAPABILITY_MINOR)),
        sm_count=read(_MULTIPROCESSOR_COUNT),
        shared_memory_per_block=read(_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        registers_per_block=read(_MAX_REGISTERS_PER_BLOCK),
        threads_per_block=read(_MAX_THREADS_PER_BLOCK),
        driver=driver.version(),
    )
