"""``scan-registry verify``: every kind of damage is found, and what is compiled again is compared."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from scan_registry import archive, inventory, providers, verify
from scan_registry.aot.compile import COMPILERS, compile_variant
from scan_registry.archive import Archive, Binary, digest
from scan_registry.cli import main
from scan_registry.cli import verify as command
from scan_registry.inventory import Attestation, Catalogue
from scan_registry.jit import CompileError
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.providers import Provider
from scan_registry.target import Target

Capture = pytest.CaptureFixture[str]
Entry = tuple[Binary, bytes]
Install = Callable[..., Archive]

FIRST, SECOND = (v for v in FAMILY.variants()[:2])
SM103, PTX80 = Target((10, 3)), Target((8, 0), "compute")


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[Entry]]:
    """Real binaries: two for sm_103, and PTX."""
    return {
        "sm103": [compile_variant(variant, SM103) for variant in (FIRST, SECOND)],
        "ptx80": [compile_variant(FIRST, PTX80)],
    }


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Writes an archive and makes it one of those that the command finds."""
    held: list[Archive] = []

    def make(label: str, binaries: list[Entry]) -> Archive:
        path = tmp_path / f"{label}{archive.SUFFIX}"
        archive.write(path, Target.parse(label), binaries, {"version": "9.9.9"})
        held.append(Archive(path, "made-up"))
        monkeypatch.setattr(command, "survey", lambda: (Catalogue(tuple(held)), ()))
        return held[-1]

    monkeypatch.setattr(command, "survey", lambda: (Catalogue(()), ()))
    monkeypatch.setenv("COLUMNS", "120")
    return make


def run(capsys: Capture, *words: str, status: int = 0) -> str:
    assert main(["verify", *words]) == status
    return capsys.readouterr().out


def valid(text: str) -> dict[str, Any]:
    """The document, after a look into its schema."""
    found: dict[str, Any] = json.loads(text)
    schema = json.loads(files("scan_registry").joinpath("schemas", "verify.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(found)
    return found


def document(capsys: Capture, *words: str, status: int = 0) -> dict[str, Any]:
    return valid(run(capsys, *words, "--json", status=status))


def altered(entry: Entry, content: bytes | None = None, /, **changes: Any) -> Entry:
    """A binary whose digest is right, whatever else was changed."""
    binary, before = entry
    after = before if content is None else content
    return replace(binary, size=len(after), sha256=digest(after), **changes), after


# --- What is intact ---------------------------------------------------------------------------


def test_what_is_really_installed_is_intact(capsys: Capture) -> None:
    held = inventory.catalogue().archives
    found = document(capsys, status=0 if held else 2)
    assert found["version"] == version("scan-registry")
    assert found["passed"] == bool(held)
    assert (found["defects"], found["not_comparable"], found["rebuilt"]) == ([], [], False)
    assert [(a["path"], a["binaries"], a["intact"]) for a in found["archives"]] == [
        (str(a.path), len(a.binaries), len(a.binaries)) for a in held
    ]
    assert found["providers"][0]["name"] == "scan-registry"


def test_intact(install: Install, compiled: dict[str, list[Entry]], capsys: Capture) -> None:
    for label, binaries in compiled.items():
        install(label, binaries)
    found = document(capsys)
    counts = [(a["arch"], a["provider"], a["binaries"], a["intact"]) for a in found["archives"]]
    assert counts == [("sm_103", "made-up", 2, 2), ("compute_80", "made-up", 1, 1)]
    assert {a["identical"] for a in found["archives"]} == {None}
    out = run(capsys)
    assert out.splitlines()[-1] == "3 of 3 binaries intact, 0 defects"
    (row,) = [line.split() for line in out.splitlines() if line.startswith("sm103")]
    assert row[:3] == ["sm103", "2", "2"]
    assert [a["arch"] for a in document(capsys, "--arch", "ptx80")["archives"]] == ["compute_80"]


def test_several_providers_have_a_column(
    install: Install, compiled: dict[str, list[Entry]], capsys: Capture
) -> None:
    install("sm103", compiled["sm103"]).provider = "somebody-else"
    assert "somebody-else" not in run(capsys)
    install("ptx80", compiled["ptx80"])
    out = run(capsys)
    assert "somebody-else" in out
    assert "made-up" in out


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


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_of_processes_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, text: str
) -> None:
    monkeypatch.setenv("SCAN_REGISTRY_JOBS", text)
    assert main(["verify"]) == 2
    assert f"SCAN_REGISTRY_JOBS is {text!r}; accepted are 1, 2, 3" in capsys.readouterr().err


# --- Damage -----------------------------------------------------------------------------------


def test_a_binary_with_other_bytes(
    install: Install, compiled: dict[str, list[Entry]], capsys: Capture, archive_parts: Any
) -> None:
    held = install("sm103", compiled["sm103"])
    held.path.write_bytes(archive_parts.flipped(held.path.read_bytes()))
    found = document(capsys, status=1)
    (defect,) = found["defects"]
    assert (defect["path"], defect["variant"]) == (str(held.path), str(SECOND))
    assert (defect["target"], found["passed"]) == ("sm_103", False)
    assert defect["reason"].startswith("has SHA-256 ")
    assert [a["intact"] for a in found["archives"]] == [1]
    lines = run(capsys, status=1).splitlines()
    (line,) = [line for line in lines if line.startswith("defect: ")]
    assert line.startswith(f"defect: {held.path}: {SECOND} for sm_103: has SHA-256 ")
    assert lines[-1] == "1 of 2 binaries intact, 1 defect"


@pytest.mark.parametrize("words", [[], ["--arch", "sm103"], ["--rebuild"]])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_an_archive_without_an_intact_manifest(
    install: Install,
    compiled: dict[str, list[Entry]],
    capsys: Capture,
    damage: str,
    words: list[str],
) -> None:
    """Also where a filter asks for what only the damaged archive may hold."""
    held = install("sm103", compiled["sm103"])
    content = bytearray(held.path.read_bytes())
    content[100] ^= 1
    if damage == "gone":
        held.path.unlink()
    else:
        held.path.write_bytes(content[:60] if damage == "cut" else content)
    found = document(capsys, *words, status=1)
    assert found["defects"][-1]["path"] == str(held.path)
    assert (found["archives"][0]["binaries"], found["archives"][0]["intact"]) == (0, 0)
    assert str(held.path) in run(capsys, *words, status=1)


def other_arch(content: bytes) -> bytes:
    """A cubin that says it is for sm_90."""
    flags = bytearray(content)
    (before,) = struct.unpack_from("<I", flags, 48)
    abi8 = flags[8] >= 8
    after = before & ~0xFF00 | 90 << 8 if abi8 else before & ~0xFF | 90
    struct.pack_into("<I", flags, 48, after)
    return bytes(flags)


@pytest.mark.parametrize(
    ("label", "change", "reason"),
    [
        ("sm103", {"registers": 1}, "registers: the manifest states 1, the image "),
        ("sm103", {"static_shared": 7}, "static_shared: the manifest states 7, the image "),
        ("sm103", {"spill_bytes": 16}, "spill_bytes: the manifest states 16, the image 0"),
        ("sm103", {"format_version": "6"}, "format_version: the manifest states 6, the image "),
        ("sm103", {"oldest_driver": (1, 0)}, "oldest_driver: the manifest states (1, 0), the "),
        ("sm103", {"entry": "another"}, "no intact kernel 'another'"),
        ("sm103", {"format": "ptx"}, "format: the manifest states ptx, but code for sm_103 is"),
        ("sm103", {"content": other_arch}, "architecture: the manifest states 103, the image 90"),
        ("sm103", {"content": lambda before: b"\x7fELF"}, "not a CUDA ELF file"),
        ("sm103", {"content": lambda before: before[:200]}, "no intact kernel"),
        ("ptx80", {"entry": "another"}, "no kernel 'another'; there are: linear_scan"),
        ("ptx80", {"format_version": "7.0"}, "format_version: the manifest states 7.0, the im"),
        ("ptx80", {"oldest_driver": (11, 0)}, "oldest_driver: the manifest states (11, 0), the"),
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
    found = document(capsys, status=1)
    assert any(reason in defect["reason"] for defect in found["defects"]), found["defects"]
    assert {defect["variant"] for defect in found["defects"]} == {str(FIRST)}
    assert found["archives"][0]["intact"] == len(rest)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source_sha256": "ab" * 32}, "is made with sources with SHA-256 abab"),
        ({"options": ("-O0",)}, "is made with options -O0; this version's are --gpu-arch"),
        ({"block": (7, 1, 1)}, "is made with threads per block: 7; this version's are "),
        ({"variant": replace(FIRST, statics=(("dtype", "int8"),))}, "have no such variant"),
        ({"variant": replace(FIRST, kernel="another")}, "have no such variant"),
        ({"variant": replace(FIRST, family="another")}, "have no such variant"),
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
    found = document(capsys, status=1)
    assert any(reason in defect["reason"] for defect in found["defects"]), found["defects"]
    assert found["archives"][0]["intact"] == 1


def test_the_digest_is_that_of_the_sources_in_the_package(
    install: Install,
    compiled: dict[str, list[Entry]],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("sm103", compiled["sm103"])
    run(capsys)
    compiler = COMPILERS["cuda"]
    held = compiler.sources
    monkeypatch.setattr(
        type(compiler), "sources", lambda self, kernel: {**held(kernel), "new.cuh": "// edited"}
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


# --- Providers --------------------------------------------------------------------------------


@pytest.fixture
def provided(tmp_path: Path, compiled: dict[str, list[Entry]]) -> Path:
    """A folder with a provider in it, as pip would have installed it."""
    site = tmp_path / "site"
    package = site / "archives_that_are_verified"
    path = package / "archives" / f"sm103{archive.SUFFIX}"
    archive.write(path, SM103, compiled["sm103"], {"version": "1.2.3"})
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "provider.json").write_text('{"schema": 1, "core": ">=0"}')
    information = site / "verified-1.2.3.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: verified\nVersion: 1.2.3\n")
    entry = f"[{providers.GROUP}]\nverified = {package.name}\n"
    (information / "entry_points.txt").write_text(entry)
    record(site)
    return site


def record(site: Path) -> None:
    """Write RECORD for what is there."""
    lines = []
    for path in sorted(site.rglob("*")):
        if path.is_file():
            encoded = urlsafe_b64encode(sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            name = path.relative_to(site).as_posix()
            lines.append(f"{name},sha256={encoded},{path.stat().st_size}\n")
    (information,) = site.glob("*.dist-info")
    (information / "RECORD").write_text("".join(lines))


def shell(site: Path, *words: str, status: int = 0, **environment: str) -> str:
    """The program in a process of its own, with the provider installed: forks need one."""
    result = subprocess.run(
        [sys.executable, "-m", "scan_registry", "verify", "--arch", "sm103", *words],
        env={**os.environ, "PYTHONPATH": str(site), "SCAN_REGISTRY_JOBS": "2", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


def read_provider(site: Path) -> Provider:
    return providers.read("verified", "1.2.3", site / "archives_that_are_verified")


def test_files_are_those_that_were_installed(
    provided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has changed an archive may have given it a good manifest."""
    monkeypatch.syspath_prepend(str(provided))
    assert verify.altered(read_provider(provided)) == []
    manifest = provided / "archives_that_are_verified" / "provider.json"
    manifest.write_text('{"schema": 1, "core": ">=0", "denied": []}')
    held = provided / "archives_that_are_verified" / "archives" / "sm103.scanreg"
    archive.write(held, SM103, [], {})
    defects = verify.altered(read_provider(provided))
    assert sorted(str(defect.path) for defect in defects) == sorted(map(str, (held, manifest)))
    for defect in defects:
        assert "SHA-256 is " in defect.reason
        assert "reinstall verified" in defect.reason
    held.unlink()
    reasons = {defect.path: defect.reason for defect in verify.altered(read_provider(provided))}
    assert reasons[held] == "No such file or directory; reinstall verified"


def test_a_missing_archive_is_a_defect(provided: Path) -> None:
    """Nothing else tells that it has ever been there."""
    shell(provided)
    held = provided / "archives_that_are_verified" / "archives" / "sm103.scanreg"
    held.unlink()
    found = valid(shell(provided, "--json", status=1))
    assert found["defects"][0]["path"] == str(held)
    assert found["defects"][0]["reason"] == "No such file or directory; reinstall verified"


def test_nothing_is_known_of_what_was_not_recorded(
    provided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(provided))
    (provided / "verified-1.2.3.dist-info" / "RECORD").unlink()
    assert verify.altered(read_provider(provided)) == []
    assert verify.altered(replace(read_provider(provided), name="not-installed-at-all")) == []


@pytest.mark.parametrize("core", [">=900", "", None])
def test_a_broken_provider_is_a_defect_and_hides_no_other(provided: Path, core: str | None) -> None:
    """Whether it is for other versions, or its manifest is not one."""
    place = provided.parent / "broken"
    shutil.copytree(provided, place)
    (place / "archives_that_are_verified").rename(place / "archives_that_are_broken")
    (place / "verified-1.2.3.dist-info").rename(place / "broken-1.2.3.dist-info")
    for path in (place / "broken-1.2.3.dist-info").iterdir():
        path.write_text(path.read_text().replace("verified", "broken"))
    manifest = place / "archives_that_are_broken" / "provider.json"
    manifest.write_text(json.dumps({"schema": 1, "core": core}))
    found = valid(shell(Path(f"{place}{os.pathsep}{provided}"), "--json", status=1))
    assert [held["intact"] for held in found["archives"]] == [2]
    assert [p["name"] for p in found["providers"]][1:] == ["verified"]
    (defect,) = found["defects"]
    assert defect["reason"].startswith("broken 1.2.3")
    out = shell(Path(f"{place}{os.pathsep}{provided}"), status=1)
    assert "defect: broken 1.2.3" in out
    assert out.splitlines()[-1] == "2 of 2 binaries intact, 1 defect"


def test_a_file_that_is_named_after_no_architecture_is_a_defect(provided: Path) -> None:
    stray = provided / "archives_that_are_verified" / "archives" / "hopper.scanreg"
    stray.write_bytes(b"")
    found = valid(shell(provided, "--json", status=1))
    assert [held["intact"] for held in found["archives"]] == [2]
    (defect,) = found["defects"]
    assert (defect["path"], defect["reason"]) == (str(stray), providers.MISNAMED)


# --- Compiling again --------------------------------------------------------------------------


def test_compiled_again_to_the_same_bytes(provided: Path) -> None:
    found = valid(shell(provided, "--rebuild", "--json"))
    (held,) = found["archives"]
    assert (held["identical"], held["not_comparable"], found["rebuilt"]) == (2, 0, True)
    assert found["passed"]
    out = shell(provided, "--rebuild")
    assert out.splitlines()[-1] == (
        "2 of 2 binaries intact, 2 of 2 compared are identical, 0 defects"
    )


def test_other_bytes_that_nothing_else_tells_of(
    provided: Path, compiled: dict[str, list[Entry]]
) -> None:
    first, second = compiled["sm103"]
    held = provided / "archives_that_are_verified" / "archives" / "sm103.scanreg"
    changed = altered(first, first[1] + b"\0")
    archive.write(held, SM103, [changed, altered(second, dynamic_shared=16)], {})
    record(provided)
    shell(provided)  # it is as it says
    found = valid(shell(provided, "--rebuild", "--json", status=1))
    assert (found["archives"][0]["intact"], found["archives"][0]["identical"]) == (2, 0)
    reasons = {defect["variant"]: defect["reason"] for defect in found["defects"]}
    assert f"compiled here has SHA-256 {first[0].sha256}" in reasons[str(FIRST)]
    assert changed[0].sha256 in reasons[str(FIRST)]
    assert reasons[str(SECOND)] == (
        "compiled here to the same bytes, but dynamic_shared is 0, installed 16"
    )


def test_another_compiler_is_no_mismatch(
    provided: Path, compiled: dict[str, list[Entry]], capsys: Capture
) -> None:
    first, second = compiled["sm103"]
    held = provided / "archives_that_are_verified" / "archives" / "sm103.scanreg"
    archive.write(held, SM103, [altered(first, compiler="nvrtc 1.2.3"), second], {})
    record(provided)
    found = valid(shell(provided, "--rebuild", "--json"))
    (entry,) = found["archives"]
    assert (entry["identical"], entry["not_comparable"]) == (1, 1)
    (other,) = found["not_comparable"]
    assert other["variant"] == str(FIRST)
    assert other["reason"] == f"made by nvrtc 1.2.3; here is {second[0].compiler}"
    archive.write(held, SM103, [altered(first, compiler="nvrtc 1.2.3")], {})
    record(provided)
    out = shell(provided, "--rebuild", status=2)
    here = f"made by nvrtc 1.2.3; here is {second[0].compiler}"
    assert f"not comparable: 1 of sm103, {here}" in out.splitlines()


def compared(held: Archive) -> list[verify.Comparison]:
    return list(verify.rebuild([(held, binary) for binary in held.binaries], workers=1))


def test_what_is_not_worth_compiling(
    install: Install,
    compiled: dict[str, list[Entry]],
    monkeypatch: pytest.MonkeyPatch,
    archive_parts: Any,
) -> None:
    first, second = compiled["sm103"]
    held = install("sm103", [altered(first, source_sha256="ab" * 32), second])
    held.path.write_bytes(archive_parts.flipped(held.path.read_bytes()))
    other, damaged = compared(held)
    assert (other.outcome, damaged.outcome) == ("not comparable", "not comparable")
    assert other.reason == "made from other sources or options"
    assert damaged.reason == "its bytes are damaged"
    monkeypatch.setattr(verify.jit, "toolchains", lambda: {"cuda": "NVRTC is not installed"})
    reasons = {comparison.reason for comparison in compared(held)}
    assert reasons == {f"made by {first[0].compiler}; here: NVRTC is not installed"}


def test_a_compile_that_fails_is_a_mismatch(
    install: Install, compiled: dict[str, list[Entry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Entry:
        raise CompileError("no such intrinsic\non line 7")

    held = install("sm103", compiled["sm103"])
    monkeypatch.setattr(verify, "compile_variant", fail)
    for comparison in compared(held):
        assert comparison.outcome == "different"
        assert comparison.reason == "does not compile here: no such intrinsic\non line 7"


@pytest.mark.parametrize("words", [["verify"], ["cache", "list"]])
def test_looking_needs_neither_torch_nor_a_compiler(words: list[str]) -> None:
    script = f"""
import sys
from scan_registry.cli import main
main({words!r})
heavy = {{"torch", "triton", "numpy", "cuda"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], cwd="/", check=True, stdout=subprocess.DEVNULL)
