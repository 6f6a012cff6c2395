"""``verify``: archives that are intact, and archives that are not."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
from verifying import FIRST, SECOND, Capture, Entry, Install, altered, document, other_arch, run

from scan_registry.aot.compile import COMPILERS
from scan_registry.artifact.archive import Binary
from scan_registry.catalog import inventory
from scan_registry.catalog.inventory import Attestation, Catalogue
from scan_registry.cli import main
from scan_registry.hardware.target import Target


@pytest.mark.slow
def test_what_is_really_installed_is_intact(capsys: Capture) -> None:
    contents = inventory.catalogue().archives
    report = document(capsys, status=0 if contents else 2)
    assert report["version"] == version("scan-registry")
    assert report["passed"] == bool(contents)
    assert (report["defects"], report["not_comparable"], report["rebuilt"]) == ([], [], False)
    assert [(a["path"], a["binaries"], a["intact"]) for a in report["archives"]] == [
        (str(a.path), len(a.binaries), len(a.binaries)) for a in contents
    ]
    assert report["providers"][0]["name"] == "scan-registry"


def test_intact(install: Install, compiled: dict[str, list[Entry]], capsys: Capture) -> None:
    for label, binaries in compiled.items():
        install(label, binaries)
    report = document(capsys)
    counts = [(a["arch"], a["provider"], a["binaries"], a["intact"]) for a in report["archives"]]
    assert counts == [("sm_103", "made-up", 2, 2), ("compute_80", "made-up", 1, 1)]
    assert {a["identical"] for a in report["archives"]} == {None}
    out = run(capsys)
    assert out.splitlines()[-1] == "3 of 3 binaries intact, 0 defects"
    (row,) = [line.split() for line in out.splitlines() if line.startswith("sm103")]
    assert row[:3] == ["sm103", "2", "2"]
    assert [a["arch"] for a in document(capsys, "--arch", "ptx80")["archives"]] == ["compute_80"]


def test_nothing_to_verify(install: Install, capsys: Capture) -> None:
    assert main(["verify"]) == 2
    assert "there is nothing to verify" in capsys.readouterr().err
    assert not document(capsys, status=2)["passed"]


def test_a_filter_that_names_nothing(
    install: Install, compiled: dict[str, list[Entry]], capsys: Capture
) -> None:
    install("sm103", compiled["sm103"])
    assert main(["verify", "--arch", "sm75"]) == 2
    err = capsys.readouterr().err
    assert "--arch 'sm75' is not installed; accepted are: sm103" in err


@pytest.mark.parametrize("text", ["0", "two"])
def test_a_number_of_processes_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, text: str
) -> None:
    monkeypatch.setenv("SCAN_REGISTRY_JOBS", text)
    assert main(["verify"]) == 2
    assert f"SCAN_REGISTRY_JOBS is {text!r}; accepted are 1, 2, 3" in capsys.readouterr().err


def test_a_binary_with_other_bytes(
    install: Install, compiled: dict[str, list[Entry]], capsys: Capture, archive_parts: Any
) -> None:
    contents = install("sm103", compiled["sm103"])
    contents.path.write_bytes(archive_parts.flipped(contents.path.read_bytes()))
    report = document(capsys, status=1)
    (defect,) = report["defects"]
    assert (defect["path"], defect["variant"]) == (str(contents.path), str(SECOND))
    assert (defect["target"], report["passed"]) == ("sm_103", False)
    assert defect["reason"].startswith("has SHA-256 ")
    assert [a["intact"] for a in report["archives"]] == [1]
    lines = run(capsys, status=1).splitlines()
    (line,) = [line for line in lines if line.startswith("defect: ")]
    assert line.startswith(f"defect: {contents.path}: {SECOND} for sm_103: has SHA-256 ")
    assert lines[-1] == "1 of 2 binaries intact, 1 defect"


@pytest.mark.parametrize(
    ("words", "damage"), [([], "cut"), (["--arch", "sm103"], "gone"), (["--rebuild"], "flipped")]
)
def test_an_archive_without_an_intact_manifest(
    install: Install,
    compiled: dict[str, list[Entry]],
    capsys: Capture,
    damage: str,
    words: list[str],
) -> None:
    """Also where a filter asks for what only the damaged archive may hold."""
    contents = install("sm103", compiled["sm103"])
    content = bytearray(contents.path.read_bytes())
    content[100] ^= 1
    if damage == "gone":
        contents.path.unlink()
    else:
        contents.path.write_bytes(content[:60] if damage == "cut" else content)
    report = document(capsys, *words, status=1)
    assert report["defects"][-1]["path"] == str(contents.path)
    assert (report["archives"][0]["binaries"], report["archives"][0]["intact"]) == (0, 0)
    assert str(contents.path) in run(capsys, *words, status=1)


@pytest.mark.parametrize(
    ("label", "change", "reason"),
    [
        ("sm103", {"registers": 1}, "registers: the entry states 1, the image "),
        ("sm103", {"oldest_driver": (1, 0)}, "oldest_driver: the entry states (1, 0), the "),
        ("sm103", {"entry": "another"}, "no intact kernel 'another'"),
        ("sm103", {"format": "ptx"}, "format: the entry states ptx, but code for sm_103 is"),
        ("sm103", {"content": other_arch}, "architecture: the entry states 103, the image 90"),
        ("sm103", {"content": lambda before: b"\x7fELF"}, "not a CUDA ELF file"),
        ("sm103", {"content": lambda before: before[:200]}, "no intact kernel"),
        ("ptx80", {"entry": "another"}, "no kernel 'another'; there are: linear_scan"),
        ("ptx80", {"format_version": "7.0"}, "format_version: the entry states 7.0, the im"),
        ("ptx80", {"content": lambda b: b.replace(b"sm_80", b"sm_90")}, "states 80, the image 90"),
        ("ptx80", {"content": lambda b: b.replace(b".target", b"//")}, "the PTX states no target"),
        ("ptx80", {"content": lambda b: b.replace(b".version", b"//")}, "PTX of version None"),
    ],
)
def test_an_image_that_says_other_than_its_manifest(
    install: Install,
    compiled: dict[str, list[Entry]],
    capsys: Capture,
    label: str,
    change: dict[str, Any],
    reason: str,
) -> None:
    """Digests do not tell: the archive was written with it."""
    first, *rest = compiled[label]
    content = change["content"](first[1]) if "content" in change else None
    others = {name: value for name, value in change.items() if name != "content"}
    install(label, [altered(first, content, **others), *rest])
    report = document(capsys, status=1)
    assert any(reason in defect["reason"] for defect in report["defects"]), report["defects"]
    assert {defect["variant"] for defect in report["defects"]} == {str(FIRST)}
    assert report["archives"][0]["intact"] == len(rest)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source_sha256": "ab" * 32}, "is made with sources with SHA-256 abab"),
        ({"options": ("-O0",)}, "is made with options -O0; this version's are --gpu-arch"),
        ({"block": (7, 1, 1)}, "is made with threads per block: 7; this version's are "),
        ({"variant": replace(FIRST, statics=(("dtype", "int8"),))}, "have no such variant"),
        ({"target": Target((9, 0))}, "is not for the archive's architecture, sm_103"),
    ],
)
def test_what_the_shipped_sources_do_not_give(
    install: Install,
    compiled: dict[str, list[Entry]],
    capsys: Capture,
    change: dict[str, Any],
    reason: str,
) -> None:
    first, second = compiled["sm103"]
    install("sm103", [altered(first, **change), second])
    report = document(capsys, status=1)
    assert any(reason in defect["reason"] for defect in report["defects"]), report["defects"]
    assert report["archives"][0]["intact"] == 1


def test_the_digest_is_that_of_the_sources_in_the_package(
    install: Install,
    compiled: dict[str, list[Entry]],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("sm103", compiled["sm103"])
    run(capsys)
    compiler = COMPILERS["cuda"]
    contents = compiler.sources
    monkeypatch.setattr(
        type(compiler), "sources", lambda self, kernel: {**contents(kernel), "new.cuh": "// edited"}
    )
    assert len(document(capsys, status=1)["defects"]) == 2


def test_a_failed_attestation_is_a_defect(
    install: Install,
    compiled: dict[str, list[Entry]],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("sm103", compiled["sm103"])
    (good, _), (bad, _) = compiled["sm103"]

    def attested(binary: Binary, error: float) -> Attestation:
        facts = {"cases": 38, "gpu": "Imaginary B", "date": "2026-01-31", "tolerance": 1e-6}
        named = {"variant": str(binary.variant), "target": str(binary.target)}
        return Attestation(sha256=binary.sha256, error=error, **named, **facts)  # type: ignore[arg-type]

    measured = {good.sha256: attested(good, 1e-7), bad.sha256: attested(bad, 3e-2)}
    monkeypatch.setattr(Catalogue, "attestations", measured)
    (defect,) = document(capsys, status=1)["defects"]
    assert defect["variant"] == str(bad.variant)
    assert defect["reason"] == (
        "failed its attestation on Imaginary B, 2026-01-31: error 3.0e-02, tolerance 1.0e-06"
    )
