"""Selection: what is denied, has failed or may not be; compilers, and what to do where nothing wins."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from imaginary import COMPILERS, FAMILY, MISSING
from selecting import CUDA, KERNEL, Describe, Factory, Make, binary_of, decide, in_memory, told

from scan_registry.artifact.archive import Archive
from scan_registry.dispatch.fit import Tier, Toolchain
from scan_registry.dispatch.policy import LEVELS, Level
from scan_registry.dispatch.select import NoKernelError, advice
from scan_registry.kernels.model import Language


def test_a_denied_digest(archive_factory: Factory, a_device: Describe) -> None:
    archives = [archive_factory("sm90"), archive_factory("ptx80")]
    best = binary_of(decide(a_device(), archives).taken())
    decision = decide(a_device(), archives, denied={best.sha256: "denied: it is wrong"})
    chosen = decision.taken()
    assert chosen.tier is Tier.EXACT
    assert binary_of(chosen).sha256 != best.sha256
    assert told(decision, str(best)) == "denied: it is wrong"
    # The digest is about those bytes: the same variant from PTX is not denied.
    everything = {b.sha256: "denied: all" for b in archives[0].binaries}
    assert decide(a_device(), archives, denied=everything).taken().tier is Tier.PTX


def test_what_failed_is_passed_over(archive_factory: Factory, a_device: Describe) -> None:
    archives = [archive_factory("sm90"), archive_factory("ptx80")]
    failed: dict[tuple[str, str], str] = {}
    tiers = []
    for number in range(100):
        decision = decide(a_device(), archives, failed=failed, toolchains=COMPILERS)
        if decision.winner is None:
            break
        tiers.append(decision.winner.tier)
        for key, reason in failed.items():
            assert reason in told(decision, key[0])
        failed[decision.winner.key] = f"failure {number}"
    assert decision.winner is None
    assert tiers == sorted(tiers)
    assert set(tiers) == {Tier.EXACT, Tier.PTX, Tier.JIT, Tier.REFERENCE}


def test_a_failure_is_about_one_archive(a_binary: Make, a_device: Describe) -> None:
    binary, _ = a_binary(CUDA[0], "sm90")
    archives = [in_memory("sm90", [binary], name) for name in ("scan-registry", "another")]
    first = decide(a_device(), archives).taken()
    decision = decide(a_device(), archives, failed={first.key: "it is damaged"})
    assert decision.taken().archive is archives[1]
    assert told(decision, str(binary)) == "it is damaged"


@pytest.mark.parametrize("lowest", list(Tier))
def test_nothing_below_the_lowest_tier_is_taken(
    archive_factory: Factory, a_device: Describe, lowest: Tier
) -> None:
    """On 8.6 there is sm_80, PTX, a compiler and torch; each is taken down to the lowest tier."""
    archives = [archive_factory(arch) for arch in ("sm80", "ptx80")]
    ways = [
        (archives, COMPILERS, Tier.SAME_MAJOR),
        (archives[1:], COMPILERS, Tier.PTX),
        ([], COMPILERS, Tier.JIT),
        ([], MISSING, Tier.REFERENCE),
    ]
    for there, toolchains, tier in ways:
        decision = decide(a_device((8, 6)), there, lowest=lowest, toolchains=toolchains)
        if tier <= lowest:
            assert decision.taken().tier is tier
        else:
            assert decision.winner is None
        for loser in decision.rejected:
            if "the policy allows none below" in loser.reason:
                assert loser.reason.endswith(f"none below {lowest}")
        if lowest < Tier.REFERENCE:
            reason = f"tier reference; the policy allows none below {lowest}"
            assert told(decision, "the reference") == reason


@pytest.mark.parametrize(
    ("cuda", "capability", "driver", "target", "needs"),
    [
        ((13, 0), (9, 0), (12, 9), "sm_90", "13.0"),
        ((12, 9), (13, 0), (12, 8), "compute_121", "12.9"),
    ],
)
def test_what_the_driver_would_not_load_is_not_compiled(
    a_device: Describe,
    cuda: tuple[int, int],
    capability: tuple[int, int],
    driver: tuple[int, int],
    target: str,
    needs: str,
) -> None:
    here: Mapping[Language, Toolchain | str] = {"cuda": Toolchain("nvrtc 99.1", cuda)}
    decision = decide(a_device(capability, driver=driver), toolchains=here)
    assert decision.taken().tier is Tier.REFERENCE
    there = ".".join(map(str, driver))
    assert told(decision, "cuda compiled here") == (
        f"what nvrtc 99.1 makes for {target} needs a driver for CUDA {needs}; "
        f"this one supports {there}"
    )
    enough = tuple(map(int, needs.split(".")))
    chosen = decide(a_device(capability, driver=enough), toolchains=here).taken()
    assert (chosen.tier, str(chosen.target)) == (Tier.JIT, target)


def test_no_winner_lists_what_is_installed_and_what_to_do(
    archive_factory: Factory, a_device: Describe
) -> None:
    device = a_device((7, 5), name="Tesla T4")
    archives = [archive_factory(arch) for arch in ("ptx80", "sm80", "sm90")]
    with pytest.raises(NoKernelError) as caught:
        decide(device, archives, lowest=Tier.JIT, toolchains=MISSING).taken()
    message = str(caught.value)
    assert message.startswith("nothing runs time_last_forward on Tesla T4 (sm_75)")
    for expected in (
        "ptx80.scanreg: compute_80 needs 8.0 or later, not 7.5",
        "sm80.scanreg: sm_80 runs on 8.0 and later 8.x; the device is 7.5",
        "sm90.scanreg: sm_90 runs on 9.0 and later 9.x; the device is 7.5",
        "NVRTC is not installed",
        "the reference: tier reference; the policy allows none below jit",
        "need compute capability 8.0",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("archs", "capability", "driver", "lowest", "expected"),
    [
        ((), (9, 0), (13, 0), "reference", "Install {wheel} built for sm90 or with PTX (ptx80)"),
        (
            ("sm90",),
            (8, 7),
            (13, 0),
            "reference",
            "Install {wheel} built for sm87 or with PTX (ptx80)",
        ),
        (
            ("sm90",),
            (8, 7),
            (13, 0),
            "aot",
            "Install {wheel} built for sm87, or allow tier reference",
        ),
        (("sm120",), (12, 1), (12, 8), "reference", "Install {wheel} built for sm121"),
        # There is PTX, and the driver is too old for it.
        (
            ("ptx80",),
            (8, 7),
            (12, 4),
            "reference",
            "{driver} 12.9, or install {wheel} built for sm87",
        ),
        (("ptx80",), (13, 0), (12, 4), "reference", "{driver} 12.9"),
        # There is PTX, and it is not allowed.
        (("ptx80",), (8, 7), (13, 0), "aot", "Install {wheel} built for sm87, or allow tier ptx"),
        (("ptx80",), (13, 0), (13, 0), "aot", "Allow tier ptx"),
        # There is PTX, and nothing is closer.
        (("ptx80",), (13, 0), (13, 0), "reference", "No wheel and no driver is known to help"),
    ],
)
def test_advice_fits_what_is_there(
    archive_factory: Factory,
    a_device: Describe,
    archs: tuple[str, ...],
    capability: tuple[int, int],
    driver: tuple[int, int],
    lowest: Level,
    expected: str,
) -> None:
    archives = [archive_factory(arch) for arch in archs]
    device = a_device(capability, driver=driver)
    decision = decide(device, archives, lowest=LEVELS[lowest], toolchains=MISSING)
    assert advice(decision) == expected.format(
        wheel="a scan-registry wheel", driver="Update the GPU's driver to one that supports CUDA"
    )


def test_advice_is_about_the_language_that_was_asked_for(
    archive_factory: Factory, a_device: Describe
) -> None:
    """An archive of other kernels, or of the same in another language, is as good as none."""
    archives = [archive_factory("sm90"), archive_factory("ptx80")]  # of CUDA variants
    decision = decide(a_device(), archives, backend="triton")
    assert advice(decision) == "Install a scan-registry wheel built for sm90 or with PTX (ptx80)"
    backward = [v for v in FAMILY.variants() if v.kernel != KERNEL]
    other = decide(a_device(), [archive_factory("sm90", variants=backward)], lowest=Tier.PTX)
    assert advice(other).startswith("Install a scan-registry wheel built for sm90 or with PTX")
    pinned = decide(a_device(), archives, backend="reference", lowest=Tier.JIT)
    assert advice(pinned) == "Allow tier reference"


def test_a_driver_is_advised_for_what_could_be_compiled_here(a_device: Describe) -> None:
    decision = decide(a_device((12, 0), driver=(12, 4)), toolchains=COMPILERS)
    start = "Update the GPU's driver to one that supports CUDA 12.8, or install"
    assert advice(decision).startswith(start)


def test_damage_is_no_archive(archive_factory: Factory, a_device: Describe) -> None:
    contents = archive_factory("sm90")
    contents.path.write_bytes(b"")
    decision = decide(a_device(), [Archive(contents.path), archive_factory("ptx80")])
    assert advice(decision) == "Install a scan-registry wheel built for sm90"


def test_a_kernel_on_the_cpu() -> None:
    with pytest.raises(NoKernelError, match=r"(?s)on the CPU.*need a CUDA device"):
        decide(None, backend="cuda").taken()
