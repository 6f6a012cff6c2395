"""Whether a binary runs on a device, and how close to it the binary is."""

from __future__ import annotations

from enum import IntEnum

from scan_registry.artifact.archive import Binary
from scan_registry.base.frozen import dataclass
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import FIRST_CUDA, OLDEST, TEGRA, Capability, CudaVersion, Target

_REGISTER_UNIT = 8  # per thread: they are allocated to warps in multiples of 256


class Tier(IntEnum):
    """How close what runs is to the device; lower is closer.

    exact       machine code for this compute capability
    same-major  machine code for an earlier minor version of it
    ptx         compiled from PTX by the driver
    jit         compiled here, for this device
    reference   plain torch
    """

    EXACT = 0
    SAME_MAJOR = 1
    PTX = 2
    JIT = 3
    REFERENCE = 4

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True)
class Toolchain:
    """A compiler on this machine: name and version, and the CUDA release whose GPUs it knows."""

    identity: str
    cuda: CudaVersion


def misfit(binary: Binary, device: Device) -> str | None:
    """Why the binary cannot run on the device, or None if it can."""
    if reason := binary.target.misfit(device.capability):
        return reason
    if binary.oldest_driver > device.driver:
        form = "PTX ISA" if binary.target.is_ptx else "ELF ABI"
        needed, there = dotted(binary.oldest_driver), dotted(device.driver)
        return (
            f"{form} {binary.format_version} for {binary.target} needs a driver for CUDA {needed}; "
            f"this one supports {there}"
        )
    registers = -(-(binary.registers or 0) // _REGISTER_UNIT) * _REGISTER_UNIT * binary.threads
    for needs, has, what in (
        (binary.threads, device.threads_per_block, "threads per block"),
        (binary.shared, device.shared_memory_per_block, "bytes of shared memory per block"),
        (registers, device.registers_per_block, "registers per block"),
    ):
        if needs > has:
            return f"{needs} {what}; the device has {has}"
    return None


def nearest_tier(target: Target, device: Device) -> Tier:
    """The tier of what was compiled ahead of time for ``target``, if it fits the device."""
    if target.is_ptx:
        return Tier.PTX
    return Tier.EXACT if target.capability == device.capability else Tier.SAME_MAJOR


def jit_target(toolchain: Toolchain, language: str, capability: Capability) -> Target | str:
    """What a compiler here makes for a device, or why it makes nothing for it.

    Machine code where it knows the capability; else, from CUDA C++, PTX for the latest one before
    that, which leaves the rest to the device's driver.
    """
    there = dotted(capability)
    if capability < OLDEST:
        return f"the kernels need compute capability {dotted(OLDEST)}; the device's is {there}"
    known = {c for c, first in FIRST_CUDA.items() if first <= toolchain.cuda}
    if capability in known:
        return Target(capability)
    earlier = [c for c in known - TEGRA if OLDEST <= c <= capability]
    if language != "cuda" or not earlier:
        return f"{toolchain.identity} (CUDA {dotted(toolchain.cuda)}) does not know {there}"
    return Target(max(earlier), "compute")


def jit_driver(toolchain: Toolchain, target: Target) -> CudaVersion:
    """The CUDA version that a driver has to support to load what a compiler here makes.

    What has been compiled states it itself (``Binary.oldest_driver``); this is known before. See
    ``aot.image`` for the rules.
    """
    if target.is_ptx:
        return toolchain.cuda
    abi_8 = toolchain.cuda >= (13, 0) and target.capability < (10, 0)
    release = (13, 0) if abi_8 else (12, 0)
    return max(release, FIRST_CUDA.get(target.capability, release))


def dotted(version: tuple[int, int]) -> str:
    """``12.9`` for (12, 9)."""
    return "{}.{}".format(*version)
