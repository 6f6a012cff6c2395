"""Whether a binary runs on a device, on which tier, and what a compiler here makes for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scan_registry.artifact.archive import Binary
from scan_registry.dispatch.fit import Tier, Toolchain, jit_driver, jit_target, misfit, nearest_tier
from scan_registry.hardware.device import Device, described
from scan_registry.hardware.target import TEGRA, Target

Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]

NVRTC_12_9 = Toolchain("nvrtc 12.9.86", (12, 9))
NVRTC_12_0 = Toolchain("nvrtc 12.0.140", (12, 0))
NVRTC_13_0 = Toolchain("nvrtc 13.0.48", (13, 0))
TRITON = Toolchain("triton 3.6.0", (12, 9))


def test_tiers_are_ordered_and_print_as_words() -> None:
    words = ["exact", "same-major", "ptx", "jit", "reference"]
    assert [str(tier) for tier in sorted(Tier)] == words


@pytest.mark.parametrize(
    ("target", "capability", "tier"),
    [
        ("sm80", (8, 0), Tier.EXACT),
        ("sm80", (8, 9), Tier.SAME_MAJOR),
        ("sm90a", (9, 0), Tier.EXACT),
        ("sm100", (10, 3), Tier.SAME_MAJOR),
        ("ptx80", (8, 0), Tier.PTX),
        ("ptx80", (12, 1), Tier.PTX),
    ],
)
def test_what_fits_and_its_tier(
    a_binary: Make, a_device: Describe, target: str, capability: tuple[int, int], tier: Tier
) -> None:
    (binary, _), device = a_binary(target=target), a_device(capability)
    assert misfit(binary, device) is None
    assert nearest_tier(binary.target, device) is tier


@pytest.mark.parametrize(
    ("target", "version", "oldest", "driver", "form"),
    [
        ("ptx80", "8.8", (12, 9), (12, 8), "PTX ISA 8.8 for compute_80"),
        ("sm120", "8", (12, 8), (12, 4), "ELF ABI 8 for sm_120"),
    ],
)
def test_a_driver_that_is_too_old(
    a_binary: Make,
    a_device: Describe,
    target: str,
    version: str,
    oldest: tuple[int, int],
    driver: tuple[int, int],
    form: str,
) -> None:
    binary, _ = a_binary(target=target, format_version=version, oldest_driver=oldest)
    device = a_device(binary.target.capability, driver=driver)
    needed, there = (".".join(map(str, pair)) for pair in (oldest, driver))
    reason = f"{form} needs a driver for CUDA {needed}; this one supports {there}"
    assert misfit(binary, device) == reason
    assert misfit(binary, replace(device, driver=oldest)) is None


@pytest.mark.parametrize(
    ("changes", "limit", "needs", "what"),
    [
        ({"block": (16, 8, 2)}, "threads_per_block", 256, "threads per block"),
        ({"static_shared": 1024}, "shared_memory_per_block", 1024, "bytes of shared memory"),
        (
            {"static_shared": 1024, "dynamic_shared": 99_000},
            "shared_memory_per_block",
            100_024,
            "bytes of shared memory",
        ),
        ({"registers": 40}, "registers_per_block", 5120, "registers per block"),
        # They are handed out in eights.
        ({"registers": 41}, "registers_per_block", 48 * 128, "registers per block"),
    ],
)
def test_a_device_that_is_too_small(
    a_binary: Make, a_device: Describe, changes: dict[str, int], limit: str, needs: int, what: str
) -> None:
    binary, _ = a_binary(**changes)
    assert misfit(binary, a_device(**{limit: needs})) is None
    reason = misfit(binary, a_device(**{limit: needs - 1}))
    assert reason is not None
    assert reason.startswith(f"{needs} {what}")
    assert reason.endswith(f"; the device has {needs - 1}")


def test_what_ptx_does_not_state_is_no_reason(a_binary: Make, a_device: Describe) -> None:
    """The driver decides on registers and static shared memory when it compiles."""
    binary, _ = a_binary(target="ptx80")
    assert (binary.registers, binary.static_shared) == (None, None)
    assert misfit(binary, a_device(registers_per_block=1, shared_memory_per_block=0)) is None


@pytest.mark.parametrize(
    ("toolchain", "capability", "target"),
    [
        (NVRTC_12_9, (11, 0), "compute_103"),
        (NVRTC_12_9, (12, 3), "compute_121"),
        (NVRTC_12_0, (10, 0), "compute_90"),
        (NVRTC_13_0, (12, 9), "compute_121"),
        (Toolchain("nvrtc 11.0", (11, 0)), (8, 6), "compute_80"),
    ],
)
def test_cuda_makes_ptx_for_what_is_too_new(
    toolchain: Toolchain, capability: tuple[int, int], target: str
) -> None:
    created = jit_target(toolchain, "cuda", capability)
    assert str(created) == target
    assert isinstance(created, Target)
    assert created.misfit(capability) is None
    assert created.capability not in TEGRA


def test_triton_makes_nothing_for_what_is_too_new() -> None:
    created = jit_target(TRITON, "triton", (13, 0))
    assert created == "triton 3.6.0 (CUDA 12.9) does not know 13.0"


@pytest.mark.parametrize("language", ["cuda", "triton"])
def test_nothing_is_compiled_for_what_is_too_old(language: str) -> None:
    target = jit_target(NVRTC_12_9, language, (7, 5))
    assert target == "the kernels need compute capability 8.0; the device's is 7.5"


@pytest.mark.parametrize(
    ("toolchain", "target", "driver"),
    [
        (NVRTC_12_9, "sm80", (12, 0)),  # every driver of the compiler's major release
        (TRITON, "sm90a", (12, 0)),
        (NVRTC_12_9, "sm120", (12, 8)),  # the first that knows the GPU
        (NVRTC_13_0, "sm90", (13, 0)),
        (NVRTC_13_0, "sm100", (12, 8)),  # CUDA 12's compilers make the same ABI for it
        (NVRTC_13_0, "sm110", (13, 0)),
        (NVRTC_12_9, "ptx121", (12, 9)),  # the compiler's own release
        (NVRTC_13_0, "ptx80", (13, 0)),
    ],
)
def test_the_driver_that_compiled_code_needs(
    toolchain: Toolchain, target: str, driver: tuple[int, int]
) -> None:
    assert jit_driver(toolchain, Target.parse(target)) == driver


def test_a_described_device_is_as_large_as_its_capability_promises(a_binary: Make) -> None:
    """One byte more than 99 KiB fits a block of 8.0 or 9.0, and none of 8.6, 8.9 or 12.x."""
    binary, _ = a_binary(target="ptx80", dynamic_shared=99 * 1024 + 1)
    assert misfit(binary, described((8, 0))) is None
    assert misfit(binary, described((9, 0))) is None
    for capability in ((8, 6), (8, 9), (12, 0), (12, 1)):
        assert "the device has 101376" in str(misfit(binary, described(capability)))
