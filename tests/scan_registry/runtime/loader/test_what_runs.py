"""The loader against the stub driver: what runs on which GPU, and what is not taken."""

from __future__ import annotations

from typing import Any

import pytest
from loading import BEST, NO_BINARY_FOR_GPU, SECOND, Rig, Synthetic, needs_nvrtc

from scan_registry.aot.compile import compile_variant
from scan_registry.artifact import archive
from scan_registry.catalog import providers
from scan_registry.hardware.target import Target


def test_two_gpus_get_different_binaries(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0), name="H").gpu((8, 0), name="A", sms=108)
    rig.holds("sm90", synthetic("sm90"))
    rig.holds("sm80", synthetic("sm80"))
    report = rig.run("""
ready = [prepare(0), prepare(1), prepare(0)]
report(ready=[facts(r) for r in ready], status=[run(r) for r in ready])
""")
    assert [(r["tier"], r["target"]) for r in report["ready"]] == [
        ("exact", "sm_90"),
        ("exact", "sm_80"),
        ("exact", "sm_90"),
    ]
    assert rig.loads() == [(0, "sm_90", 0), (1, "sm_80", 0)]
    launches = rig.stub.calls("cuLaunchKernel")
    assert [launch.device for launch in launches] == [0, 1, 0]
    assert report["status"] == [0, 0, 0]
    assert {launch.block for launch in launches} == {(128, 1, 1)}
    assert report["told"] == []


@needs_nvrtc
def test_binaries_of_the_real_compiler(rig: Rig) -> None:
    rig.stub.gpu((9, 0)).gpu((8, 6)).gpu((10, 0))
    for arch in ("sm90", "sm80", "ptx80"):
        rig.holds(arch, compile_variant(BEST, Target.parse(arch)))
    report = rig.run("""
ready = [prepare(0), prepare(1), prepare(2)]
report(ready=[facts(r) for r in ready], status=[run(r) for r in ready])
""")
    tiers = [r["tier"] for r in report["ready"]]
    assert tiers == ["exact", "same-major", "ptx"]
    assert rig.loads() == [(0, "sm_90", 0), (1, "sm_80", 0), (2, "compute_80", 0)]
    assert (report["status"], report["told"]) == ([0, 0, 0], [])


def test_the_cpu_needs_no_driver(rig: Rig, synthetic: Synthetic) -> None:
    rig.holds("sm90", synthetic("sm90"))
    report = rig.run("report(ready=facts(prepare(None)), opened=mapped('libcuda'))")
    assert report["ready"]["tier"] == "reference"
    assert not report["ready"]["launches"]
    assert not report["opened"]
    assert rig.stub.calls() == []


def test_a_driver_that_cannot_be_opened_is_named(rig: Rig) -> None:
    report = rig.run("report(it=attempt(prepare))", SCAN_REGISTRY_LIBCUDA="/nowhere/libcuda.so.1")
    assert report["it"]["error"] == "RuntimeError"
    assert "/nowhere/libcuda.so.1" in report["it"]["words"]


def test_a_machine_without_a_gpu(rig: Rig) -> None:
    report = rig.run("report(it=attempt(prepare))")
    assert report["it"]["error"] == "DriverError"
    assert "CUDA_ERROR_NO_DEVICE" in report["it"]["words"]


def test_a_file_that_is_named_after_no_architecture_warns_once(
    rig: Rig, synthetic: Synthetic
) -> None:
    rig.stub.gpu((9, 0))
    path = rig.holds("sm90", synthetic("sm90"))
    backup = path.with_name(f"sm90 (copy){archive.SUFFIX}")
    backup.write_bytes(path.read_bytes())
    report = rig.run("""
ready = [prepare(), prepare(time=2048)]
report(ready=[facts(r) for r in ready])
""")
    assert [ready["tier"] for ready in report["ready"]] == ["exact", "exact"]
    (warning,) = report["told"]
    assert warning == f"FallbackWarning: {backup} {providers.MISNAMED}"


@pytest.mark.parametrize("damaged", ["binary", "manifest"])
def test_damage_warns_once_and_the_next_tier_is_taken(
    rig: Rig, synthetic: Synthetic, archive_parts: Any, damaged: str
) -> None:
    rig.stub.gpu((9, 0))
    binary, code = synthetic("sm90")
    path = rig.holds("sm90", (binary, code))
    rig.holds("ptx80", synthetic("ptx80"))
    content, words = path.read_bytes(), [str(path)]
    if damaged == "binary":
        path.write_bytes(archive_parts.flipped(content))
        words += [str(binary), binary.sha256]
    else:
        path.write_bytes(content.replace(b"imaginary", b"imbginary", 1))
    subject = str(binary) if damaged == "binary" else "acme-kernels's sm90.scanreg"
    report = rig.run("""
ready = [prepare(), prepare(time=2048)]
report(ready=[facts(r) for r in ready])
""")
    for ready in report["ready"]:
        assert ready["tier"] == "ptx"
        assert str(path) in ready["rejected"][subject]
    assert rig.loads() == [(0, "compute_80", 0)]
    (warning,) = report["told"]
    assert warning.startswith("FallbackWarning")
    assert all(word in warning for word in words)


def test_one_damaged_binary_does_not_spoil_its_archive(
    rig: Rig, synthetic: Synthetic, archive_parts: Any
) -> None:
    rig.stub.gpu((9, 0))
    first, second = synthetic("sm90"), synthetic("sm90", SECOND)
    path, best = rig.holds("sm90", first, second), first[0]
    path.write_bytes(archive_parts.flipped(path.read_bytes(), 0))
    report = rig.run("report(ready=facts(prepare()))")
    assert (report["ready"]["tier"], report["ready"]["variant"]) == ("exact", str(SECOND))
    assert "SHA-256" in report["ready"]["rejected"][str(best)]


def test_an_archive_that_vanishes(rig: Rig, synthetic: Synthetic) -> None:
    """Its manifest has been read, then the package is upgraded under the process."""
    rig.stub.gpu((9, 0))
    path = rig.holds("sm90", synthetic("sm90"))
    rig.holds("ptx80", synthetic("ptx80"))
    report = rig.run(f"""
decision = loader.decide(0, FAMILY, prepare(None).decision.problem, "auto", Tier.REFERENCE)
os.unlink({str(path)!r})
report(before=str(decision.winner.tier), ready=facts(prepare()))
""")
    assert (report["before"], report["ready"]["tier"]) == ("exact", "ptx")
    assert "No such file" in report["told"][0]
    assert str(path) in report["told"][0]


@pytest.mark.parametrize(
    ("call", "status", "name"),
    [
        ("cuModuleLoadData", NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ("cuModuleLoadData", 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        ("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND"),
    ],
)
def test_what_the_driver_refuses_is_a_reason(
    rig: Rig, synthetic: Synthetic, call: str, status: int, name: str
) -> None:
    """It holds for that binary on that device alone, and is not tried again."""
    rig.stub.gpu((9, 0)).gpu((9, 0)).fail(call, status, times=1, device=0)
    binary, code = synthetic("sm90")
    rig.holds("sm90", (binary, code))
    rig.holds("ptx80", synthetic("ptx80"))
    report = rig.run("""
ready = [prepare(0), prepare(0, time=2048), prepare(1)]
report(ready=[facts(r) for r in ready])
""")
    assert [r["tier"] for r in report["ready"]] == ["ptx", "ptx", "exact"]
    for ready in report["ready"][:2]:
        assert name in ready["rejected"][str(binary)]
    assert [(device, image) for device, image, _ in rig.loads()] == [
        (0, "sm_90"),
        (0, "compute_80"),
        (1, "sm_90"),
    ]


def test_ptx_of_a_later_release_than_it_states(rig: Rig, synthetic: Synthetic) -> None:
    """The manifest is wrong about the driver that it needs; the driver is right."""
    rig.stub.version = (12, 4)
    rig.stub.gpu((9, 0))
    late, _ = inputs = synthetic("ptx90", ptx="8.8", oldest_driver=(12, 0))
    rig.holds("ptx90", inputs)
    rig.holds("ptx80", synthetic("ptx80", ptx="8.4", oldest_driver=(12, 4)))
    report = rig.run("report(ready=facts(prepare()))")
    assert report["ready"]["target"] == "compute_80"
    assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in report["ready"]["rejected"][str(late)]


def test_nothing_runs(rig: Rig, synthetic: Synthetic) -> None:
    """What was found out by trying stands in the error."""
    rig.stub.gpu((9, 0)).fail("cuModuleLoadData", NO_BINARY_FOR_GPU)
    binary, code = synthetic("sm90")
    rig.holds("sm90", (binary, code))
    report = rig.run("report(it=attempt(prepare, lowest=Tier.PTX))")
    assert report["it"]["error"] == "NoKernelError"
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in report["it"]["words"]
    assert str(binary) in report["it"]["words"]
