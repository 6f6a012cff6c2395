"""``doctor`` on imaginary installations, and on the one that is really here."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from diagnosing import HELD, SCHEMA, Capture, Make, Provide, document, errors, text
from imaginary import FAMILY
from jsonschema import Draft202012Validator

from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive
from scan_registry.cache.store import Cache
from scan_registry.catalog import providers
from scan_registry.catalog.inventory import catalogue
from scan_registry.catalog.providers import ProviderError
from scan_registry.cli import doctor as command
from scan_registry.cli import main
from scan_registry.diagnostics.doctor import coverage
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import System
from scan_registry.hardware.target import Target
from scan_registry.kernels.tuning import Row, Tuning

# --- The command: the installation ------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "tier"),
    [
        (["--for", "sm_90"], 0, "exact"),
        (
            ["--for", "sm_121", "--driver", "575", "--sms", "48", "--shared-memory", "101376"],
            0,
            "ptx",
        ),
        (["--for", "sm_121", "--driver", "575.57.08"], 0, "ptx"),
        (["--for", "sm_121", "--driver", "570"], 1, "reference"),
        (["--for", "sm_90", "--driver", "12.4"], 0, "exact"),
        (["--for", "sm_75"], 1, "reference"),
    ],
)
def test_exit_status(
    provide: Provide, capsys: Capture, words: list[str], status: int, tier: str
) -> None:
    provide(archs=["sm90", "ptx80"])
    report = document(capsys, *words, status=status)
    (gpu,) = report["gpus"]
    assert {answer["tiers"]["auto"] for answer in gpu["answers"]} == {tier}
    assert (gpu["ordinal"], gpu["device"]["arch"]) == (None, str(Target.parse(words[1])))
    assert bool(errors(report)) == bool(status)
    out = text(capsys, *words, status=status)
    product = f" --for {words[1]}"
    question = f"`scan-registry explain linear_scan --dtype float32 --shape …{product}`"
    start = "Not every call that was checked runs a kernel." if status else "Checked: 13 kernels, "
    last = out.splitlines()[-1]
    assert last.startswith(start)
    assert last.endswith(f"Ask about your sizes: {question}")
    row = next(line.split() for line in out.splitlines() if "channel_last_forward" in line)
    assert row[1] == tier
    assert ("driver 575 or later" in out) == (status == 1 and words[1] != "sm_75")


def test_providers_are_listed(provide: Provide, capsys: Capture) -> None:
    provide(archs=["sm90"])
    provide("more-kernels", ["sm120"], core=">=0.1,<9", denied={"ab" * 32: "denied: it races"})
    report = document(capsys, "--for", "sm_120")
    first, second = report["providers"]
    assert (first["name"], first["mismatch"], first["denied"]) == ("scan-registry", None, [])
    assert (second["version"], second["core"]) == ("1.2", ">=0.1,<9")
    assert second["denied"] == [{"subject": "ab" * 32, "reason": "denied: it races"}]
    assert [a["arch"] for p in report["providers"] for a in p["archives"]] == ["sm_90", "sm_120"]
    assert all(a["binaries"] == len(HELD) and a["damage"] is None for a in second["archives"])
    out = text(capsys, "--for", "sm_120")
    assert f"more-kernels 1.2: {'ab' * 32}: denied: it races" in out


def test_a_provider_that_does_not_fit(provide: Provide, capsys: Capture) -> None:
    provide(archs=["sm90"])
    later = provide("later-kernels", ["sm120"], core=">=7")
    # In a later format, for all that this version knows; that is no damage.
    (later.folder / "archives" / "sm120.scanreg").write_bytes(b"SCANREG\x09")
    report = document(capsys, "--for", "sm_90", status=1)
    (message,) = errors(report)
    assert message.startswith("later-kernels 1.2 is made for scan-registry >=7, but scan-registry ")
    assert report["findings"][0]["remedies"][0].startswith("`pip install 'scan-registry>=7'`")
    assert report["providers"][1]["mismatch"]
    assert report["providers"][1]["archives"][0]["binaries"] is None
    # It goes on, without what does not fit.
    assert {a["tiers"]["auto"] for a in report["gpus"][0]["answers"]} == {"exact"}
    report = document(capsys, "--for", "sm_120", status=1)
    assert {a["tiers"]["auto"] for a in report["gpus"][0]["answers"]} == {"reference"}


def test_providers_that_are_not_intact(
    provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so of each, and goes on with the others."""
    intact = provide(archs=["sm90"]), provide("fine-kernels", ["sm120"])
    broken = (ProviderError("a 1.2: provider.json is not JSON"), ProviderError("b 1.0: gone"))
    monkeypatch.setattr(providers, "installed", lambda: (intact, broken))
    report = document(capsys, "--for", "sm_120", status=1)
    assert errors(report) == [f"{error}: every call on a GPU raises it" for error in broken]
    assert [p["name"] for p in report["providers"]] == ["scan-registry", "fine-kernels"]
    assert {a["tiers"]["auto"] for a in report["gpus"][0]["answers"]} == {"exact"}


def test_an_archive_that_was_deleted(
    provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was installed says that it has been there."""
    folder = provide("kernels", ["sm90", "sm120"]).folder
    record = tmp_path / "kernels-1.2.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: kernels\nVersion: 1.2\n", encoding="utf-8")
    files = [f"kernels/archives/{label}.scanreg,sha256=AA,1\n" for label in ("sm90", "sm120")]
    (record / "RECORD").write_text("".join(files), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    (folder / "archives" / "sm90.scanreg").unlink()
    report = document(capsys, "--for", "sm_120", status=1)
    assert errors(report) == ["archives/sm90.scanreg is missing"]
    assert report["first"] == {"about": "kernels 1.2", "remedy": "reinstall kernels"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_archive(
    provide: Provide, capsys: Capture, archive_parts: Any, damage: str
) -> None:
    contents = provide(archs=["sm90", "ptx80"])
    path = contents.folder / "archives" / "sm90.scanreg"
    content = archive_parts.flipped(path.read_bytes())
    if damage == "gone":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        path.write_bytes(content[:100] if damage == "cut" else content)
    report = document(capsys, "--for", "sm_90", status=1)
    (message,) = errors(report)
    assert str(path) in message
    (state,) = [a for a in report["providers"][0]["archives"] if a["arch"] == "sm_90"]
    assert state["damage"] == message
    assert state["binaries"] == (len(HELD) - 1 if damage == "flipped" else 0)
    (finding,) = [f for f in report["findings"] if f["severity"] == "error"]
    assert finding["remedies"] == ["reinstall scan-registry"]
    answers = {a["tiers"]["auto"] for a in report["gpus"][0]["answers"]}
    # The damaged binary is the only one of its kernel that is held.
    assert answers == ({"exact", "ptx"} if damage == "flipped" else {"ptx"})
    assert "sm90 (damaged)" in text(capsys, "--for", "sm_90", status=1)


def test_the_policy_in_force(
    provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(archs=["ptx80"])
    assert document(capsys, "--for", "sm_90")["lowest_tier"] == "reference"
    with policy.require("aot"):
        report = document(capsys, "--for", "sm_90", status=1)
        assert report["lowest_tier"] == "same-major"
        assert "down to tier same-major" in text(capsys, "--for", "sm_90", status=1)
    for word, remedy in (("sometimes", "unset {}"), ("aott", "set {}=aot")):
        monkeypatch.setenv(policy.VARIABLE, word)
        policy._default.cache_clear()
        try:
            report = document(capsys, "--for", "sm_90", status=1)
        finally:
            policy._default.cache_clear()
        assert errors(report)[0].startswith(
            f"SCAN_REGISTRY_REQUIRE is {word!r}; accepted are exact, aot"
        )
        assert report["first"]["remedy"] == remedy.format(policy.VARIABLE)


# --- The command: the cache -------------------------------------------------------------------


def test_the_cache(provide: Provide, capsys: Capture, tmp_path: Path, a_binary: Make) -> None:
    provide(archs=["sm90"])
    folder = tmp_path / "cache"
    cache = document(capsys, "--for", "sm_90")["cache"]
    assert (cache["folder"], cache["unusable"], cache["entries"]) == (str(folder), None, 0)
    assert cache["free"] > 0
    assert not folder.exists()
    key = "ab" * 32
    Cache(folder).put(key, Target.parse("sm90"), a_binary())
    path = folder / key[:2] / key / "sm90.scanreg"
    cache = document(capsys, "--for", "sm_90")["cache"]
    assert (cache["entries"], cache["size"]) == (1, path.stat().st_size)
    assert ": 1 entry, " in text(capsys, "--for", "sm_90")


def test_a_cache_that_others_can_write_to(
    provide: Provide, capsys: Capture, tmp_path: Path
) -> None:
    provide(archs=["sm90"])
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(stat.S_IRWXU | stat.S_IWOTH)
    report = document(capsys, "--for", "sm_90")  # a warning: nothing has to be compiled
    (finding,) = report["findings"]
    assert (finding["severity"], finding["about"]) == ("warning", f"cache folder {folder}")
    assert "others can write to it" in finding["text"]
    assert finding["remedies"][0] == f"chmod go-w {folder}"
    assert f"→ chmod go-w {folder}" in text(capsys, "--for", "sm_90")
    folder.chmod(stat.S_IRWXU)
    assert document(capsys, "--for", "sm_90")["findings"] == []


@pytest.mark.parametrize("trouble", ["a file", "read-only", "full"])
def test_a_cache_that_cannot_be_used(
    provide: Provide, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    provide(archs=["sm90"])
    folder = tmp_path / "cache"
    if trouble == "a file":
        folder.write_text("", encoding="utf-8")
    elif trouble == "read-only":
        monkeypatch.setattr(command.os, "access", lambda *_: False)
    else:
        usage = command.shutil.disk_usage(tmp_path)
        monkeypatch.setattr(command.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    report = document(capsys, "--for", "sm_90")
    words = {"a file": "it is not a folder", "read-only": "is read-only", "full": "1.0 kB left"}
    assert words[trouble] in report["cache"]["unusable"]
    (finding,) = report["findings"]
    assert finding["severity"] == "warning"
    assert "SCAN_REGISTRY_CACHE" in finding["remedies"][0]


# --- What is really installed -----------------------------------------------------------------


@pytest.fixture(scope="module")
def really_installed() -> tuple[Any, Any]:
    """Real providers, whose archives are then read once."""
    return providers.installed()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_121"])
def test_whatever_is_installed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, really_installed: tuple[Any, Any], arch: str
) -> None:
    """Its form is that of the schema; what is installed for a GPU runs on it. Wheels have no gated scans in float16, and ssd_scan
    takes shared memory that sm_86 and sm_121 lack: its gradients in float32, and 128 states in float32 and 256 in any dtype."""
    monkeypatch.setattr(providers, "installed", lambda: really_installed)
    status = main(["doctor", "--for", arch, "--json"])
    report = json.loads(capsys.readouterr().out)
    Draft202012Validator(SCHEMA).validate(report)
    assert status == (0 if report["passed"] else 1)
    assert not any(archive["damage"] for p in report["providers"] for archive in p["archives"])
    capability = Target.parse(arch).capability
    fitting = [a for a in catalogue().archives if a.arch.misfit(capability) is None]
    answers = report["gpus"][0]["answers"]
    compiled = [a for a in answers if (a["family"], a["dtype"]) == ("gated_scan", "float16")]
    assert len(compiled) == 4
    assert {a["tiers"]["auto"] for a in compiled} <= {"jit", "reference"}
    large = [
        a
        for a in answers
        if ((a["family"], a["kernel"]) == ("ssd_scan", "backward") and a["dtype"] == "float32")
        or (
            (a["family"], a["kernel"]) == ("ssd_scan", "forward")
            and (a["size"] == "256 states" or (a["dtype"], a["size"]) == ("float32", "128 states"))
        )
    ]
    assert len(large) == 7
    if capability in ((8, 6), (12, 1)):
        assert {a["tiers"]["auto"] for a in large} == {"reference"}
        compiled += large
    tiers = {a["tiers"]["auto"] for a in answers if a not in compiled}
    if capability < (8, 0):
        assert (status, tiers) == (1, {"reference"})
    elif any(a.arch.capability == capability and not a.arch.is_ptx for a in fitting):
        assert (status, tiers) == (0, {"exact"})
    elif fitting:
        assert status == 0
        of_ssd = [a for a in answers if a["family"] == "ssd_scan" and a not in compiled]
        tiers = {a["tiers"]["auto"] for a in answers if a not in (*compiled, *of_ssd)}
        assert tiers in ({"same-major"}, {"ptx"})
        # Of PTX there is what every GPU has shared memory for.
        assert {a["tiers"]["auto"] for a in of_ssd} - {"jit", "reference"} == tiers
    else:
        assert tiers in ({"jit"}, {"reference"})


def test_it_says_whether_there_is_a_table(tmp_path: Path, a_binary: Any, a_device: Any) -> None:
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    sample = next(s for s in FAMILY.samples if s.problem.kernel == kernel.name)
    assert kernel.tunable.shape is not None
    shape = kernel.tunable.shape(sample.problem)
    taken = next(v for v in kernel.variants if kernel.rules.accepts(v, sample.problem) is None)
    row = Row(shape.sizes, {kernel.label(taken): 1.0})
    tuning = Tuning.of("sm_90", "Imaginary T", "2026-02-01", {shape.kind: [row]})
    path, contents = tmp_path / "sm90.scanreg", [a_binary(v, "sm90") for v in kernel.variants]
    for inputs, expected in (({kernel.head: [tuning]}, 1), (None, 0)):
        archive.write(path, Target.parse("sm90"), contents, {}, inputs)
        actual = coverage(
            System(a_device(), (Archive(path),)), {FAMILY.name: FAMILY}, Tier.REFERENCE
        )
        assert len(actual.tuned) == expected
        for origin in actual.tuned:
            assert str(origin) == "the shipped table, sm_90, Imaginary T, 2026-02-01"
