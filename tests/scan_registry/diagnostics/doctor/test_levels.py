"""``doctor --require``, ``--family`` and ``--dtype``: what is checked, and how far down a kernel may be."""

from __future__ import annotations

import pytest
from diagnosing import Capture, Describe, Factory, Provide, document, text
from imaginary import COMPILERS

from scan_registry.cli import main
from scan_registry.diagnostics.doctor import coverage, lacks
from scan_registry.diagnostics.doctor_report import Finding
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import System
from scan_registry.hardware.target import Target
from scan_registry.kernels import families

SSD = families()["ssd_scan"]


def of_ssd(there: System, lowest: Tier) -> list[Finding]:
    one = {SSD.name: SSD}
    result = lacks(coverage(there, one, lowest), there, one, lowest)
    return [finding for finding in result if "backend=" not in finding.text]


@pytest.fixture
def small(archive_factory: Factory, a_device: Describe) -> System:
    """A GPU with the shared memory of capability 8.9, and all that a wheel holds of ``ssd_scan`` for it."""
    target = Target((8, 9))
    entries = [v for k in SSD.kernels for v in k.variants if k.rules.serves(v.statics, target)]
    device = a_device((8, 9), shared_memory_per_block=target.shared_memory)
    return System(device, (archive_factory("sm89", variants=entries),), COMPILERS)


def test_each_number_of_states_is_checked(small: System) -> None:
    answers = coverage(small, {SSD.name: SSD}, Tier.PTX).answers
    tiers = {(a.kernel, *a.pair): a.tiers["auto"] for a in answers}
    assert tiers["forward", "float32", "64 states"] is Tier.EXACT
    assert tiers["forward", "float32", "128 states"] is None
    assert tiers["forward", "bfloat16", "128 states"] is Tier.EXACT
    assert tiers["forward", "bfloat16", "256 states"] is None
    assert tiers["backward", "bfloat16", "256 states"] is Tier.EXACT
    assert tiers["backward", "float32", "64 states"] is None


@pytest.mark.parametrize(
    ("lowest", "severity"), [(Tier.PTX, "error"), (Tier.JIT, "error"), (Tier.REFERENCE, "warning")]
)
def test_what_no_kernel_computes_there(small: System, lowest: Tier, severity: str) -> None:
    """It fails under a policy that leaves nothing else; no install and no compiler is advised."""
    (result,) = of_ssd(small, lowest)
    assert result.severity == severity
    assert "no wheel holds it: ssd_scan.forward (float32 128 states, " in result.text
    assert "ssd_scan.backward (float32)" in result.text
    allowed = ("allow tier reference: SCAN_REGISTRY_REQUIRE=reference",)
    assert result.remedies == (allowed if severity == "error" else ())
    assert any("bytes of shared memory per block; the device has" in r for r in result.reasons)
    assert not any("it is not for sm_89" in reason for reason in result.reasons)


def test_a_level_is_required(provide: Provide, capsys: Capture) -> None:
    provide(archs=["ptx80"])
    out = text(capsys, "--for", "A100")
    assert "To do first" not in out
    assert "Ask about your sizes" in out.splitlines()[-1]
    assert document(capsys, "--for", "A100", "--require", "ptx")["lowest_tier"] == "ptx"
    report = document(capsys, "--for", "A100", "--require", "aot", status=1)
    assert {a["tiers"]["auto"] for a in report["gpus"][0]["answers"]} == {None}
    assert report["first"]["remedy"] == "`pip install scan-registry-sm80`"
    out = text(capsys, "--for", "A100", "--require", "aot", status=1)
    assert "To do first: `pip install scan-registry-sm80`" in out


def test_what_no_wheel_holds_is_below_a_level_that_is_required(
    archive_factory: Factory, a_device: Describe
) -> None:
    gated, sm90 = families()["gated_scan"], Target((9, 0))
    entries = [v for k in gated.kernels for v in k.variants if k.rules.ships(v.statics, sm90)]
    there, one = (
        System(a_device(), (archive_factory("sm90", variants=entries),)),
        {"gated_scan": gated},
    )
    covered = coverage(there, one, Tier.SAME_MAJOR)
    for without_exception, severity in ((False, "warning"), (True, "error")):
        result = lacks(covered, there, one, Tier.SAME_MAJOR, without_exception=without_exception)
        (left,) = [f for f in result if "backend=" not in f.text]
        assert left.severity == severity


def test_families_and_dtypes_are_chosen(provide: Provide, capsys: Capture) -> None:
    provide(archs=["sm90"])
    words = ["--for", "H100", "--family", "linear_scan", "--dtype", "bf16"]
    (gpu,) = document(capsys, *words)["gpus"]
    assert {(a["family"], a["dtype"]) for a in gpu["answers"]} == {("linear_scan", "bfloat16")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--require", "aott"], "--require is 'aott'; accepted are exact, aot, "),
        (["--family", "linear_scam"], "did you mean linear_scan?"),
        (["--dtype", "bfloat15"], "did you mean bfloat16?"),
    ],
)
def test_wrong_words(provide: Provide, capsys: Capture, words: list[str], message: str) -> None:
    provide(archs=["sm90"])
    assert main(["doctor", "--for", "H100", *words]) == 2
    assert message in capsys.readouterr().err


def test_one_gpu_at_a_time(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--for", "A100", "--for", "L40S"])
    assert "--for is given twice; ask about one GPU at a time" in capsys.readouterr().err


def test_the_package_of_the_gpu_is_named(provide: Provide, capsys: Capture) -> None:
    provide()
    report = document(capsys, "--for", "A100", status=1)
    (nothing,) = [f for f in report["findings"] if "no package with GPU kernels" in f["text"]]
    assert nothing["remedies"] == ["`pip install scan-registry-sm80`"]
