"""``doctor``: what it finds on imaginary systems, and what it advises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosing import (
    CUDA,
    EVERY,
    FAMILIES,
    KERNELS,
    SOLVING,
    SOLVING_CUDA,
    Describe,
    Factory,
    Make,
    findings,
    only,
    tiers,
)
from imaginary import FAMILY, MISSING, NVRTC

from scan_registry.artifact.archive import Archive
from scan_registry.diagnostics.doctor import coverage
from scan_registry.diagnostics.doctor_words import condensed
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import System


def test_every_sample_is_asked_about(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device(), (archive_factory("sm90", variants=FAMILY.variants()),))
    result = coverage(there, FAMILIES, Tier.REFERENCE)
    assert {answer.kernel for answer in result.answers} == KERNELS
    requested = [(a.family, a.kernel, a.dtype, a.access) for a in result.answers]
    assert len(set(requested)) == len(requested) == len(FAMILY.samples)
    for answer in result.answers:
        languages = [kernel.language for kernel in FAMILY.kernels if kernel.name == answer.kernel]
        assert answer.tiers == dict.fromkeys(("auto", *languages), Tier.EXACT)
    assert findings(there) == []


def test_a_language_that_is_missing(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device(), (archive_factory("sm90"),), MISSING)
    assert (tiers(there, "auto"), tiers(there, "triton")) == ({"exact"}, {"None"})
    result = only(there)
    assert result.severity == "warning"
    assert 'with backend="triton"' in result.text
    assert "every kernel" in result.text
    ptx = "`pip install scan-registry-ptx80`"
    assert result.remedies == (ptx, "Triton is not installed")
    assert result.reasons[-1] == "triton compiled here: Triton is not installed"


@pytest.mark.parametrize(
    ("archs", "capability", "severity", "tier", "remedies"),
    [
        (["sm120", "ptx80"], (12, 1), None, "same-major", []),
        (["sm90", "ptx80"], (12, 1), "note", "ptx", ["-sm120`"]),
        (["sm86", "ptx80"], (8, 7), "note", "ptx", ["-C archs=sm87`"]),
        (["sm90", "ptx80"], (13, 0), "note", "ptx", []),
        (["sm90"], (13, 0), "error", "reference", ["-ptx80`", *MISSING.values()]),
        (["sm90"], (12, 0), "error", "reference", ["-sm120`", "-ptx80`", *MISSING.values()]),
        (["sm90", "ptx80"], (7, 5), "error", "reference", ["8.0 or later"]),
    ],
)
def test_wheels(
    archive_factory: Factory,
    a_device: Describe,
    archs: list[str],
    capability: tuple[int, int],
    severity: str | None,
    tier: str,
    remedies: list[str],
) -> None:
    archives = tuple(archive_factory(arch, variants=FAMILY.variants()) for arch in archs)
    there = System(a_device(capability), archives, MISSING)
    assert tiers(there, "auto") == {tier}
    if severity is None:
        assert findings(there) == []
        return
    actual = only(there, severity=severity)
    assert actual.about == "Imaginary {0}.{1} (sm_{0}{1})".format(*capability)
    assert "every kernel" in actual.text
    assert len(actual.remedies) == len(remedies)
    for inputs, expected in zip(actual.remedies, remedies, strict=True):
        assert inputs.endswith(expected)


def test_a_gpu_that_is_too_old(archive_factory: Factory, a_device: Describe) -> None:
    """One reason, which no archive repeats."""
    archives = (archive_factory("ptx80"), archive_factory("sm90"))
    result = only(System(a_device((7, 0)), archives, MISSING), severity="error")
    assert result.text.startswith(
        "too old: its compute capability is 7.0, and the kernels need 8.0"
    )
    assert result.reasons == ()


def test_a_driver_that_is_too_old_for_the_ptx(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device((8, 7), driver=(12, 4)), (archive_factory("ptx80"),), MISSING)
    assert tiers(there, "auto") == {"reference"}
    result = only(there, severity="error")
    assert result.remedies[0] == "install driver 575 or later, for CUDA 12.9"
    assert "falls to plain torch (reference): every kernel" in result.text
    assert (
        f"{len(SOLVING_CUDA)} variants for compute_80: PTX ISA 8.8 for compute_80 needs a driver for CUDA 12.9; "
        "this one supports 12.4"
    ) in result.reasons
    enough = replace(there, device=a_device((8, 7), driver=(12, 9)))
    assert tiers(enough, "auto") == {"ptx"}
    assert not any("driver" in remedy for remedy in only(enough, severity="note").remedies)


def test_the_oldest_driver_that_helps_is_named(
    archive_factory: Factory, a_device: Describe, a_binary: Make
) -> None:
    binaries = [
        a_binary(variant, "ptx80", oldest_driver=(12, 6) if number % 2 else (12, 5))
        for number, variant in enumerate(CUDA)
    ]
    device = a_device(driver=(12, 4))
    there = System(device, (archive_factory("ptx80", binaries),))
    assert only(there, severity="error").remedies[0] == "install driver 560 or later, for CUDA 12.6"
    unheard_of = [a_binary(variant, "ptx80", oldest_driver=(99, 1)) for variant in CUDA]
    there = System(device, (archive_factory("ptx80", unheard_of),))
    assert only(there, severity="error").remedies[0] == "install a driver for CUDA 99.1"


def test_a_driver_that_is_too_old_for_what_is_compiled_here(a_device: Describe) -> None:
    there = System(a_device((12, 0), driver=(12, 4)), (), {**MISSING, "cuda": NVRTC})
    result = only(there, severity="error")
    assert result.remedies[0] == "install driver 570 or later, for CUDA 12.8"
    assert (
        "cuda compiled here: what nvrtc 12.9.86 makes for sm_120 needs a driver for CUDA 12.8; "
        "this one supports 12.4"
    ) in result.reasons
    enough = replace(there, device=a_device((12, 0), driver=(12, 8)))
    assert tiers(enough, "auto") == {"jit"}


def test_no_driver_is_advised_that_would_not_help(
    archive_factory: Factory, a_device: Describe
) -> None:
    """The machine code that there is runs with any driver; the PTX beside it does not matter."""
    archives = (archive_factory("ptx80"), archive_factory("sm90"))
    there = System(a_device(driver=(12, 4)), archives)
    assert tiers(there, "auto") == {"exact"}
    assert [f for f in findings(there) if any("driver" in r for r in f.remedies)] == []


def test_a_compiler_stands_in(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device((12, 0)), (archive_factory("sm90"),), {**MISSING, "cuda": NVRTC})
    assert tiers(there, "auto") == {"jit"}
    jit, triton = findings(there)
    assert (jit.severity, triton.severity) == ("warning", "warning")
    assert jit.text == "compiled here, at its first use: every kernel"
    assert jit.remedies == (
        "`pip install scan-registry-sm120`",
        "`pip install scan-registry-ptx80`",
    )
    assert "Triton is not installed" in triton.remedies


@pytest.mark.parametrize(
    ("level", "tier", "advice"),
    [("aot", "None", "allow tier ptx: SCAN_REGISTRY_REQUIRE=ptx"), ("ptx", "ptx", None)],
)
def test_the_policy(
    archive_factory: Factory, a_device: Describe, level: policy.Level, tier: str, advice: str | None
) -> None:
    archives = (archive_factory("ptx80", variants=EVERY),)
    there = System(a_device((8, 7)), archives, MISSING)
    lowest = policy.LEVELS[level]
    assert tiers(there, "auto", lowest) == {tier}
    result = only(there, lowest)
    if advice is None:
        assert result.severity == "note"
        return
    assert result.severity == "error"
    assert result.text == "nothing runs, the call raises NoKernelError: every kernel"
    # First what keeps to the policy.
    assert result.remedies == ("build a wheel for sm87: `pip wheel . -C archs=sm87`", advice)
    assert (
        f"{len(SOLVING)} variants for compute_80: tier ptx; the policy allows none below same-major"
        in result.reasons
    )


def test_what_is_denied(archive_factory: Factory, a_device: Describe) -> None:
    contents = archive_factory("sm90")
    denied = {
        entry.binary.sha256: "denied: it races (somebody 1.0)"
        for entry in contents.of("linear_scan", "time_last_forward")
        if entry.variant.text("dtype") == "float16"
    }
    there = System(a_device(), (contents,), MISSING, denied)
    assert tiers(there, "auto") == {"exact", "reference"}
    result = only(there, severity="error")
    assert result.text.endswith(": linear_scan.time_last_forward (float16)")
    assert any("package that denies" in remedy for remedy in result.remedies)
    assert "5 variants for sm_90: denied: it races (somebody 1.0)" in result.reasons
    # Where only one is denied, others take its place.
    first = dict(list(denied.items())[:1])
    assert tiers(replace(there, denied=first), "auto") == {"exact"}


def test_reasons_are_those_of_what_would_solve_the_problem(
    archive_factory: Factory, a_device: Describe
) -> None:
    small = a_device(threads_per_block=16)
    result = only(System(small, (archive_factory("sm90"),), MISSING), severity="error")
    reason = f"{len(SOLVING_CUDA)} variants for sm_90: 128 threads per block; the device has 16"
    assert reason in result.reasons
    assert not any("dtype" in reason or "was asked for" in reason for reason in result.reasons)


def test_many_reasons_are_cut(archive_factory: Factory, a_device: Describe) -> None:
    archives = tuple(archive_factory(f"sm{n}", variants=CUDA[:1]) for n in range(90, 99))
    result = only(System(a_device((8, 0)), archives, MISSING), severity="error")
    assert len(result.reasons) == 9
    assert result.reasons[-1].startswith("and more")


def test_pairs_in_few_words() -> None:
    every = [(d, a) for d in ("f", "h") for a in ("x", "y")]
    assert condensed(every, every) == ""
    assert condensed([("f", "x"), ("h", "x")], every) == "x"
    assert condensed([("h", "x"), ("h", "y")], every) == "h"
    assert condensed([("h", "y")], every) == "h y"
    assert condensed([("f", "x"), ("h", "y")], every) == "f x, h y"


def test_a_damaged_archive_does_not_stop_the_advice(
    archive_factory: Factory, a_device: Describe
) -> None:
    contents = archive_factory("ptx80")
    contents.path.write_bytes(b"")
    result = only(System(a_device((8, 7)), (Archive(contents.path),), MISSING), severity="error")
    assert any("are no archive" in reason for reason in result.reasons)
