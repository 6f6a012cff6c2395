"""Selection from any catalogue for any device, against its rules written out once more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imaginary import FAMILY
from selecting import CUDA, KERNEL, TRITON, Describe, Make, a_problem, in_memory

from scan_registry.artifact.archive import Archive, Binary, digest
from scan_registry.dispatch import candidates
from scan_registry.dispatch.fit import Tier, Toolchain
from scan_registry.dispatch.select import (
    BACKENDS,
    Backend,
    Candidate,
    Decision,
    NoKernelError,
    System,
    select,
)
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import FIRST_CUDA, TEGRA, Target
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.model import LANGUAGES, Variant

CAPABILITIES = st.sampled_from([(7, 5), *(c for c in FIRST_CUDA if c >= (8, 0)), (13, 0)])
ARCHS = st.sampled_from(
    ["ptx80", "ptx90", "sm80", "sm86", "sm87", "sm89", "sm90", "sm90a", "sm100", "sm120", "sm121a"]
)
VERSIONS = st.sampled_from([(11, 4), (12, 0), (12, 4), (12, 8), (12, 9), (13, 0)])
#: One kernel's variants mostly, so that they compete; and some that must be left out.
VARIANTS = st.sampled_from([*CUDA, *TRITON, *FAMILY.variants()[-3:]])
TOOLCHAINS = st.none() | st.fixed_dictionaries(
    {
        "cuda": st.builds(Toolchain, st.just("nvrtc"), VERSIONS) | st.just("no NVRTC"),
        "triton": st.builds(Toolchain, st.just("triton"), VERSIONS) | st.just("no Triton"),
    }
)


@st.composite
def devices(draw: st.DrawFn, describe: Describe) -> Device:
    return describe(
        draw(CAPABILITIES),
        threads_per_block=draw(st.sampled_from([512, 1024])),
        registers_per_block=draw(st.sampled_from([8192, 65_536])),
        shared_memory_per_block=draw(st.sampled_from([49_152, 101_376, 232_448])),
        driver=draw(VERSIONS),
    )


@st.composite
def catalogues(draw: st.DrawFn, make: Make) -> tuple[Archive, ...]:
    """Archives of several providers. Now and then a binary is not of its archive's architecture."""
    archives = []
    origins = st.tuples(ARCHS, st.sampled_from(["scan-registry", "another"]))
    for arch, provider in draw(st.lists(origins, unique=True, max_size=6)):
        binaries = []
        for variant in draw(st.lists(VARIANTS, max_size=6, unique=True)):
            target = draw(st.sampled_from([arch, arch, arch, "sm90a", "ptx80"]))
            ptx = target.startswith("ptx")
            binary, _ = make(
                variant,
                target,
                block=(draw(st.sampled_from([32, 128, 1024])), 1, 1),
                dynamic_shared=draw(st.sampled_from([0, 50_000, 150_000])),
                static_shared=None if ptx else draw(st.sampled_from([0, 40_000])),
                registers=None if ptx else draw(st.sampled_from([16, 61, 64, 255])),
                oldest_driver=draw(VERSIONS),
            )
            binaries.append(binary)
        archives.append(in_memory(arch, binaries, provider))
    return tuple(archives)


def runs(target: Target, capability: tuple[int, int]) -> bool:
    """What the CUDA documentation says of where code runs."""
    if target.is_ptx:
        return target.capability <= capability
    if target.capability == capability:
        return True
    return (
        target.suffix == ""
        and target.capability[0] == capability[0]
        and target.capability[1] <= capability[1]
        and target.capability not in TEGRA
        and capability not in TEGRA
    )


def fits(binary: Binary, device: Device) -> bool:
    """``runs``, and the limits of driver and device."""
    threads = binary.block[0] * binary.block[1] * binary.block[2]
    registers = 0 if binary.registers is None else (binary.registers + 7) // 8 * 8
    return (
        runs(binary.target, device.capability)
        and binary.oldest_driver <= device.driver
        and threads <= device.threads_per_block
        and registers * threads <= device.registers_per_block
        and (binary.static_shared or 0) + binary.dynamic_shared <= device.shared_memory_per_block
    )


def tier(binary: Binary, device: Device) -> Tier:
    if binary.target.is_ptx:
        return Tier.PTX
    return Tier.EXACT if binary.target.capability == device.capability else Tier.SAME_MAJOR


def compiled_for(toolchain: Toolchain, language: str, device: Device) -> Target | None:
    """What the compiler would make for the device, if its driver can load it: machine code, or PTX
    from CUDA C++."""
    if device.capability < (8, 0):
        return None
    known = [c for c, first in FIRST_CUDA.items() if first <= toolchain.cuda]
    if device.capability in known:
        # CUDA 13's compilers write machine code for GPUs before 10.0 in a form of their own.
        own_form = toolchain.cuda >= (13, 0) and device.capability < (10, 0)
        oldest = max((13, 0) if own_form else (12, 0), FIRST_CUDA[device.capability])
        return Target(device.capability) if device.driver >= oldest else None
    earlier = [c for c in known if (8, 0) <= c < device.capability and c not in TEGRA]
    if language != "cuda" or not earlier or device.driver < toolchain.cuda:
        return None
    return Target(max(earlier), "compute")


def either_way(variant: Variant) -> str:
    statics = tuple(pin for pin in variant.statics if pin[0] != "reverse")
    return str(replace(variant, statics=statics))


Possible = tuple[Tier, str, str]


def possible(system: System, problem: LinearScanProblem, backend: Backend) -> list[Possible]:
    """All that solves the problem, derived anew: tier, subject, and where it comes from."""
    result: list[Possible] = []
    device = system.device
    assert device is not None

    def usable(variant: Variant) -> bool:
        kernel = FAMILY.kernel(variant.kernel, variant.language)
        return (
            variant.kernel == problem.kernel
            and backend in ("auto", variant.language)
            and not {str(variant), either_way(variant)} & system.denied.keys()
            and kernel.rules.accepts(variant, problem) is None
        )

    for archive in system.archives:
        for binary in archive.binaries if runs(archive.arch, device.capability) else ():
            if (
                usable(binary.variant)
                and fits(binary, device)
                and binary.sha256 not in system.denied
            ):
                result.append((tier(binary, device), str(binary), str(archive.path)))
    for language, toolchain in (system.toolchains or {}).items():
        if isinstance(toolchain, Toolchain):
            target = compiled_for(toolchain, language, device)
            for variant in FAMILY.kernel(KERNEL, language).variants if target else ():
                if usable(variant):
                    result.append((Tier.JIT, f"{variant} for {target}", "here"))
    if backend in ("auto", "reference"):
        result.append((Tier.REFERENCE, "the reference", "here"))
    return [way for way in result if way[1:] not in system.failed]


def considered(system: System) -> list[str]:
    """The subject of every binary, compiler or whole archive that there is something to say of."""
    device = system.device
    assert device is not None
    subjects = ["the reference"]
    for archive in system.archives:
        if runs(archive.arch, device.capability):
            subjects += [str(b) for b in archive.binaries if b.variant.kernel == KERNEL]
        else:
            subjects.append(f"{archive.provider}'s {archive.path.name}")
    for language, toolchain in (system.toolchains or {}).items():
        target = (
            compiled_for(toolchain, language, device) if isinstance(toolchain, Toolchain) else None
        )
        if target is None:
            subjects.append(f"{language} compiled here")
        else:
            subjects += [f"{v} for {target}" for v in FAMILY.kernel(KERNEL, language).variants]
    return subjects


def identity(candidate: Candidate | None) -> object:
    """What it is and where it comes from, however often it was read from there."""
    return candidate and (candidate.key, candidate.binary, candidate.launch, candidate.order)


def check_winner(decision: Decision, allowed: list[Possible]) -> None:
    """It is the closest of what is allowed."""
    winner = decision.winner
    assert (winner is None) == (not allowed)
    if winner is None:
        with pytest.raises(NoKernelError):
            decision.taken()
        return
    assert (winner.tier, *winner.key) in allowed
    assert winner.tier == min(way[0] for way in allowed)
    assert decision.taken() is winner
    if winner.binary is not None:
        assert winner.archive is not None
        assert winner.binary in winner.archive.binaries
    assert (decision.launch() is None) == (winner.tier is Tier.REFERENCE)


@pytest.mark.slow
@settings(max_examples=4 * settings.default.max_examples)
@given(data=st.data())
def test_any_system(data: st.DataObject, a_device: Describe, a_binary: Make) -> None:
    """The winner fits and is allowed, nothing that is allowed is closer, and all else has a reason."""
    archives = data.draw(catalogues(a_binary), label="archives")
    entries = [binary for archive in archives for binary in archive.binaries]
    subjects = st.sampled_from([digest(b"unknown"), *(b.sha256 for b in entries), *map(str, CUDA)])
    system = System(
        device=data.draw(devices(a_device), label="device"),
        archives=archives,
        toolchains=data.draw(TOOLCHAINS, label="toolchains"),
        denied=data.draw(st.dictionaries(subjects, st.just("denied: no"), max_size=3)),
    )
    problem = a_problem(
        data.draw(st.integers(1, 5000)),
        data.draw(st.sampled_from(["float32", "bfloat16"])),
        data.draw(st.sampled_from([4, 16])),
    )
    backend: Backend = data.draw(st.sampled_from(BACKENDS), label="backend")
    lowest = data.draw(st.sampled_from(Tier), label="lowest")
    able = possible(system, problem, backend)
    if able:
        failures = st.sets(st.sampled_from(sorted({way[1:] for way in able})), max_size=2)
        system = replace(system, failed=dict.fromkeys(data.draw(failures), "it failed"))
    allowed = [way for way in possible(system, problem, backend) if way[0] <= lowest]

    decision = select(system, FAMILY, problem, backend, lowest)

    winner = decision.winner
    check_winner(decision, allowed)
    every = [
        candidates.checked(system, problem, item, lowest)
        for language in LANGUAGES
        if backend in ("auto", language)
        for item in candidates.candidates(system, FAMILY, problem, language, all_dtypes=True)
        if isinstance(item, Candidate)
    ]
    result = [outcome for outcome in every if isinstance(outcome, Candidate)]
    if winner is not None and winner.tier < Tier.REFERENCE:
        assert identity(winner) == identity(
            min(result, key=lambda candidate: candidate.order_among(LANGUAGES))
        )
    accounted = [r.subject for r in decision.rejected] + ([winner.subject] if winner else [])
    assert sorted(accounted) == sorted(considered(system))
    assert all(loser.reason.strip() and not loser.damaged for loser in decision.rejected)

    if winner is None or winner.tier < Tier.JIT:
        blind = select(replace(system, toolchains=None), FAMILY, problem, backend, lowest)
        assert identity(blind.winner) == identity(winner)
