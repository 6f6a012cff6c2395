"""GPUs as selection sees them: a few numbers, so that any device can be described without one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from scan_registry.target import Capability

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
    multiprocessors: int
    shared_memory_per_block: int
    registers_per_block: int
    threads_per_block: int
    driver: tuple[int, int]

    @property
    def arch(self) -> str:
        """``sm_90`` for compute capability 9.0."""
        return "sm_{}{}".format(*self.capability)


@cache
def device(ordinal: int) -> Device:
    """The GPU that torch calls ``cuda:<ordinal>``. Needs a driver, creates no context."""
    from scan_registry import driver

    def read(number: int) -> int:
        return driver.attribute(ordinal, number)

    return Device(
        name=driver.device_name(ordinal),
        capability=(read(_CAPABILITY_MAJOR), read(_CAPABILITY_MINOR)),
        multiprocessors=read(_MULTIPROCESSOR_COUNT),
        shared_memory_per_block=read(_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        registers_per_block=read(_MAX_REGISTERS_PER_BLOCK),
        threads_per_block=read(_MAX_THREADS_PER_BLOCK),
        driver=driver.version(),
    )
