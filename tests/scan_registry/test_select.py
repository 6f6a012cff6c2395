"""Selection over imaginary devices and archives: who wins, and what is said of those who lose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scan_registry.archive import Archive, Binary
from scan_registry.device import Device
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Language, Variant
from scan_registry.select import (
    BACKENDS,
    Backend,
    Decision,
    NoKernelError,
    Rejected,
    Rung,
    require,
    select,
)
from scan_registry.target import Target

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]

KERNEL = "time_last_forward"
CUDA = FAMILY.kernel(KERNEL, "cuda").variants
TRITON = FAMILY.kernel(KERNEL, "triton").variants
WARPS = {variant: FAMILY.kernel(KERNEL, variant.language).warps(variant) for variant in CUDA}


def a_problem(time: int = 1024, dtype: str = "float32", alignment: int = 16) -> LinearScanProblem:
    """Forward, time contiguous, two batches of three channels."""
    strides = (Strides(3 * time, time, 1),) * 3
    return LinearScanProblem("forward", "time_last", dtype, 2, 3, time, strides, alignment)


def in_memory(arch: str, binaries: Iterable[Binary]) -> Archive:
    """An archive that was never on disk: selection looks at nothing but arch and binaries."""
    archive = Archive(Path(f"{Target.parse(arch).label}.scanreg"))
    archive.__dict__["binaries"] = tuple(binaries)
    return archive


def reasons(decision: Decision) -> str:
    return "\n".join(f"{loser.subject}: {loser.reason}" for loser in decision.rejected)


# --- Rungs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("archs", "capability", "winner", "rung"),
    [
        (("ptx80", "sm80", "sm86", "sm90"), (8, 6), "sm_86", Rung.EXACT),
        (("ptx80", "sm80", "sm90"), (8, 6), "sm_80", Rung.SAME_MAJOR),
        (("ptx80", "sm90"), (8, 6), "compute_80", Rung.PTX),
        (("ptx80", "sm80", "sm90"), (9, 0), "sm_90", Rung.EXACT),
        (("ptx80", "sm80", "sm90"), (10, 0), "compute_80", Rung.PTX),
        (("ptx80", "sm100", "sm90"), (10, 3), "sm_100", Rung.SAME_MAJOR),
        (("sm86", "sm80"), (8, 0), "sm_80", Rung.EXACT),
    ],
)
def test_the_closest_rung_wins(
    archive_factory: Factory,
    a_device: Describe,
    archs: tuple[str, ...],
    capability: tuple[int, int],
    winner: str,
    rung: Rung,
) -> None:
    archives = [archive_factory(arch) for arch in archs]
    for order in (archives, archives[::-1]):
        chosen = require(select(a_device(capability), order, FAMILY, a_problem()))
        assert (str(chosen.binary.target), chosen.rung) == (winner, rung)


def test_losers_of_a_later_rung_are_told_so(archive_factory: Factory, a_device: Describe) -> None:
    archives = [archive_factory("sm80", variants=CUDA), archive_factory("ptx80", variants=CUDA)]
    decision = select(a_device((8, 6)), archives, FAMILY, a_problem())
    assert "for compute_80: rung ptx; the winner's is same-major" in reasons(decision)


def test_cuda_wins_over_triton_on_one_rung(archive_factory: Factory, a_device: Describe) -> None:
    archive = archive_factory("sm90", variants=[*TRITON, *CUDA])
    decision = select(a_device(), [archive], FAMILY, a_problem())
    assert require(decision).binary.variant.language == "cuda"
    assert "cuda comes first" in reasons(decision)


def test_the_spec_decides_among_equals(archive_factory: Factory, a_device: Describe) -> None:
    kernel = FAMILY.kernel(KERNEL, "cuda")
    for time in (1, 100, 1000, 5000, 100_000):
        problem = a_problem(time)
        able = [v for v in CUDA if kernel.accepts(v, problem) is None]
        best = min(able, key=lambda v: kernel.cost(v, problem))
        for order in (CUDA, CUDA[::-1]):
            archive = archive_factory("sm90", variants=order)
            decision = select(a_device(), [archive], FAMILY, problem)
            assert require(decision).binary.variant == best
            assert "the spec prefers the winner" in reasons(decision)


# --- Rejections -------------------------------------------------------------------------------


def test_architecture_specific_code_stays_on_its_architecture(
    archive_factory: Factory, a_device: Describe, a_binary: Make
) -> None:
    """Triton's sm_90a binaries lie in the archive of sm_90, beside CUDA's sm_90."""
    both = [a_binary(TRITON[0], "sm90a"), a_binary(CUDA[0], "sm90")]
    archive = archive_factory("sm90", both)
    chosen = require(select(a_device((9, 0)), [archive], FAMILY, a_problem(), "triton"))
    assert (str(chosen.binary.target), chosen.rung) == ("sm_90a", Rung.EXACT)
    # No 9.1 exists; were there one, sm_90 code would run on it and sm_90a code would not.
    decision = select(
        a_device((9, 1)), [archive], FAMILY, a_problem(dtype=both[0][0].variant.text("dtype"))
    )
    assert str(require(decision).binary.target) == "sm_90"
    assert "sm_90a runs on 9.0 only; the device is 9.1" in reasons(decision)


def test_sm90a_on_a_later_generation(archive_factory: Factory, a_device: Describe) -> None:
    decision = select(a_device((10, 0)), [archive_factory("sm90a")], FAMILY, a_problem())
    assert decision.winner is None
    assert decision.rejected == (
        Rejected("sm90a.scanreg", "sm_90a runs on 9.0 only; the device is 10.0"),
    )


def test_newer_minor_version(archive_factory: Factory, a_device: Describe) -> None:
    decision = select(a_device((8, 0)), [archive_factory("sm86")], FAMILY, a_problem())
    assert decision.winner is None
    assert decision.rejected == (
        Rejected("sm86.scanreg", "sm_86 runs on 8.6 and later 8.x; the device is 8.0"),
    )


def test_an_archive_that_cannot_run_is_not_read(
    archive_factory: Factory, a_device: Describe, tmp_path: Path
) -> None:
    (tmp_path / "sm80.scanreg").write_bytes(b"garbage")
    others = [Archive(tmp_path / "sm80.scanreg"), Archive(tmp_path / "missing" / "sm120.scanreg")]
    decision = select(a_device((9, 0)), [*others, archive_factory("sm90")], FAMILY, a_problem())
    assert decision.winner is not None
    assert [loser.subject for loser in decision.rejected[:2]] == ["sm80.scanreg", "sm120.scanreg"]


def test_backend_pins_the_language(archive_factory: Factory, a_device: Describe) -> None:
    archive = archive_factory("sm90", variants=[*CUDA, *TRITON])
    languages: tuple[tuple[Language, Language], ...] = (("cuda", "triton"), ("triton", "cuda"))
    for backend, other in languages:
        decision = select(a_device(), [archive], FAMILY, a_problem(), backend)
        assert require(decision).binary.variant.language == backend
        told = [r for r in decision.rejected if r.reason == f"backend={backend!r} was asked for"]
        assert len(told) == len(FAMILY.kernel(KERNEL, other).variants)
    decision = select(a_device(), [archive], FAMILY, a_problem(), "reference")
    assert decision.winner is None


def test_a_closer_rung_beats_the_preferred_language(
    archive_factory: Factory, a_device: Describe
) -> None:
    archives = [archive_factory("ptx80", variants=CUDA), archive_factory("sm90", variants=TRITON)]
    chosen = require(select(a_device(), archives, FAMILY, a_problem()))
    assert (chosen.binary.variant.language, chosen.rung) == ("triton", Rung.EXACT)


@pytest.mark.parametrize(
    ("limit", "value", "changes", "reason"),
    [
        ("threads_per_block", 64, {}, "128 threads per block; the device has 64"),
        ("shared_memory_per_block", 1023, {}, "1024 bytes of shared memory; the device has 1023"),
        (
            "shared_memory_per_block",
            100_000,
            {"dynamic_shared": 99_000},
            "100024 bytes of shared memory; the device has 100000",
        ),
        ("registers_per_block", 5119, {}, "5120 registers per block; the device has 5119"),
    ],
)
def test_a_small_device(
    archive_factory: Factory,
    a_device: Describe,
    a_binary: Make,
    limit: str,
    value: int,
    changes: dict[str, int],
    reason: str,
) -> None:
    archive = archive_factory("sm90", [a_binary(CUDA[0], **changes)])
    problem = a_problem(dtype=CUDA[0].text("dtype"))
    decision = select(a_device(**{limit: value}), [archive], FAMILY, problem)
    assert decision.winner is None
    assert decision.rejected == (Rejected(f"{CUDA[0]} for sm_90", reason),)
    enough = {limit: value if limit == "threads_per_block" else value + 24}
    if limit == "threads_per_block":
        enough = {limit: 128}
    assert select(a_device(**enough), [archive], FAMILY, problem).winner is not None


def test_what_the_spec_does_not_accept(archive_factory: Factory, a_device: Describe) -> None:
    archive = archive_factory("sm90", variants=CUDA)
    decision = select(a_device(), [archive], FAMILY, a_problem(1023, "float16", alignment=2))
    variant = require(decision).binary.variant
    assert (variant.text("dtype"), variant.text("access")) == ("float16", "generic")
    assert "dtype=float32" in reasons(decision)
    assert "dtype float32, not float16" in reasons(decision)
    assert "rows are not made of whole chunks of 8 float16" in reasons(decision)


def test_other_kernels_are_not_mentioned(archive_factory: Factory, a_device: Describe) -> None:
    decision = select(a_device(), [archive_factory("sm90")], FAMILY, a_problem())
    assert len(decision.rejected) == len(CUDA) - 1
    assert all(KERNEL in loser.subject for loser in decision.rejected)


# --- No winner --------------------------------------------------------------------------------


def test_no_winner_lists_what_is_installed_and_what_to_do(
    archive_factory: Factory, a_device: Describe
) -> None:
    device = a_device((7, 5), name="Tesla T4")
    archives = [archive_factory(arch) for arch in ("ptx80", "sm80", "sm90")]
    with pytest.raises(NoKernelError) as caught:
        require(select(device, archives, FAMILY, a_problem()))
    message = str(caught.value)
    assert message.startswith("no installed binary runs time_last_forward on Tesla T4 (sm_75)")
    for expected in (
        "ptx80.scanreg: compute_80 needs 8.0 or later, not 7.5",
        "sm80.scanreg: sm_80 runs on 8.0 and later 8.x; the device is 7.5",
        "sm90.scanreg: sm_90 runs on 9.0 and later 9.x; the device is 7.5",
        "need compute capability 8.0",
        "backend='reference'",
    ):
        assert expected in message


def test_no_archive_at_all(a_device: Describe) -> None:
    with pytest.raises(
        NoKernelError, match=r"(?s)nothing.*wheel that was built for sm90, or with PTX"
    ):
        require(select(a_device(), [], FAMILY, a_problem()))


# --- Any device, any catalogue ----------------------------------------------------------------

CAPABILITIES = st.sampled_from([(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
ARCHS = st.sampled_from(
    ["ptx80", "ptx90", "sm80", "sm86", "sm89", "sm90", "sm90a", "sm100", "sm120"]
)


@st.composite
def catalogues(draw: st.DrawFn, make: Make) -> list[Archive]:
    archives = []
    for arch in draw(st.lists(ARCHS, unique=True, max_size=6)):
        variants: list[Variant] = draw(
            st.lists(st.sampled_from(FAMILY.variants()), max_size=6, unique=True)
        )
        binaries = [
            make(
                variant,
                arch,
                block=(draw(st.sampled_from([32, 128, 1024])), 1, 1),
                dynamic_shared=draw(st.sampled_from([0, 50_000, 150_000])),
                static_shared=None
                if arch.startswith("ptx")
                else draw(st.sampled_from([0, 40_000])),
                registers=None if arch.startswith("ptx") else draw(st.sampled_from([16, 64, 255])),
            )[0]
            for variant in variants
        ]
        archives.append(in_memory(arch, binaries))
    return archives


def fits(binary: Binary, device: Device) -> bool:
    """What the CUDA documentation says of where code runs, and the device's limits."""
    (major, minor), threads = device.capability, binary.block[0]
    built = binary.target.capability
    if binary.target.suffix == "a":
        runs = built == device.capability
    elif binary.target.is_ptx:
        runs = built <= device.capability
    else:
        # 8.7 is a Tegra system, the only one among CAPABILITIES; no ARCH here is made for it.
        runs = built[0] == major and built[1] <= minor and device.capability != (8, 7)
    return (
        runs
        and threads <= device.threads_per_block
        and (binary.registers or 0) * threads <= device.registers_per_block
        and (binary.static_shared or 0) + binary.dynamic_shared <= device.shared_memory_per_block
    )


def rung(binary: Binary, device: Device) -> Rung:
    if binary.target.is_ptx:
        return Rung.PTX
    return Rung.EXACT if binary.target.capability == device.capability else Rung.SAME_MAJOR


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_winner_fits_and_nothing_that_fits_is_closer(
    data: st.DataObject, a_device: Describe, a_binary: Make
) -> None:
    device = a_device(
        data.draw(CAPABILITIES),
        threads_per_block=data.draw(st.sampled_from([512, 1024])),
        registers_per_block=data.draw(st.sampled_from([8192, 65_536])),
        shared_memory_per_block=data.draw(st.sampled_from([49_152, 101_376, 232_448])),
    )
    archives = data.draw(catalogues(a_binary))
    problem = a_problem(
        data.draw(st.integers(1, 5000)),
        data.draw(st.sampled_from(["float32", "bfloat16"])),
        data.draw(st.sampled_from([4, 16])),
    )
    backend: Backend = data.draw(st.sampled_from(BACKENDS[:3]))
    decision = select(device, archives, FAMILY, problem, backend)

    able = [
        binary
        for archive in archives
        for binary in archive.binaries
        if binary.variant.kernel == problem.kernel
        and backend in ("auto", binary.variant.language)
        and FAMILY.kernel(KERNEL, binary.variant.language).accepts(binary.variant, problem) is None
        and fits(binary, device)
    ]
    assert (decision.winner is None) == (not able)
    if decision.winner is not None:
        assert decision.winner.binary in able
        assert decision.winner.binary in decision.winner.archive.binaries
        assert decision.winner.rung == min(rung(binary, device) for binary in able)
    # Everything is accounted for: archives of other architectures as a whole, and each binary of
    # the kernel in the rest, whether it won or lost.
    looked_at = [
        f"{binary.variant} for {binary.target}"
        for archive in archives
        if archive.arch.misfit(device.capability) is None
        for binary in archive.binaries
        if binary.variant.kernel == problem.kernel
    ]
    unread = [a.path.name for a in archives if a.arch.misfit(device.capability) is not None]
    won = decision.winner and decision.winner.binary
    accounted = [r.subject for r in decision.rejected] + (
        [f"{won.variant} for {won.target}"] if won else []
    )
    assert sorted(accounted) == sorted(looked_at + unread)
    assert all(loser.reason for loser in decision.rejected)


def test_more_blocks_than_a_grid_holds(archive_factory: Factory, a_device: Describe) -> None:
    rows = 2**34
    problem = replace(a_problem(), batch=1, channels=rows)
    decision = select(a_device(), [archive_factory("sm90")], FAMILY, problem)
    assert decision.winner is None
    assert f"blocks; a grid holds {2**31 - 1}" in reasons(decision)
