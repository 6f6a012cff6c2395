"""``verify``: packages that bring archives, and compiling those again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verifying import (
    FIRST,
    SECOND,
    SM103,
    Capture,
    Entry,
    Install,
    altered,
    read_provider,
    record,
    shell,
    valid,
)

from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive
from scan_registry.catalog import providers
from scan_registry.cli import main
from scan_registry.diagnostics import verify
from scan_registry.runtime.jit import CompileError

Program = Callable[..., str]
#: The archive in the folder of ``provided``.
CONTENTS = Path("archives_that_are_verified", "archives", "sm103.scanreg")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Program:
    """What the program prints in this process, with providers installed in some folders, and none of the archives that
    are really here, as all of them would be opened."""
    core = tmp_path / "core"
    (core / "catalog").mkdir(parents=True)
    shutil.copy(Path(providers.__file__).parents[1] / "provider.json", core)
    monkeypatch.setattr(providers, "__file__", str(core / "catalog" / "providers.py"))
    monkeypatch.setenv("SCAN_REGISTRY_JOBS", "1")  # others would be forks of this process

    def run(*inputs: Path | str, status: int = 0) -> str:
        with monkeypatch.context() as patch:
            for site in reversed([item for item in inputs if isinstance(item, Path)]):
                patch.syspath_prepend(str(site))
            words = [item for item in inputs if isinstance(item, str)]
            assert main(["verify", "--arch", "sm103", *words]) == status
        return capsys.readouterr().out

    return run


def test_files_are_those_that_were_installed(
    provided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has changed an archive may have given it a good manifest."""
    monkeypatch.syspath_prepend(str(provided))
    assert verify.altered(read_provider(provided)) == []
    manifest = provided / "archives_that_are_verified" / "provider.json"
    manifest.write_text('{"schema": 1, "core": ">=0", "denied": []}', encoding="utf-8")
    contents = provided / CONTENTS
    archive.write(contents, SM103, [], {})
    defects = verify.altered(read_provider(provided))
    assert sorted(str(defect.path) for defect in defects) == sorted(map(str, (contents, manifest)))
    for defect in defects:
        assert "SHA-256 is " in defect.reason
        assert "reinstall verified" in defect.reason
    contents.unlink()
    reasons = {defect.path: defect.reason for defect in verify.altered(read_provider(provided))}
    assert reasons[contents] == "No such file or directory; reinstall verified"


def test_a_missing_archive_is_a_defect(provided: Path, program: Program) -> None:
    """Nothing else tells that it has ever been there."""
    program(provided)
    contents = provided / CONTENTS
    contents.unlink()
    report = valid(program(provided, "--json", status=1))
    assert report["defects"][0]["path"] == str(contents)
    assert report["defects"][0]["reason"] == "No such file or directory; reinstall verified"


def test_nothing_is_known_of_what_was_not_recorded(
    provided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(provided))
    (provided / "verified-1.2.3.dist-info" / "RECORD").unlink()
    assert verify.altered(read_provider(provided)) == []
    assert verify.altered(replace(read_provider(provided), name="not-installed-at-all")) == []


@pytest.mark.parametrize("core", [">=900", "", None])
def test_a_broken_provider_is_a_defect_and_hides_no_other(
    provided: Path, program: Program, core: str | None
) -> None:
    """Whether it is for other versions, or its manifest is not one."""
    place = provided.parent / "broken"
    shutil.copytree(provided, place)
    (place / "archives_that_are_verified").rename(place / "archives_that_are_broken")
    (place / "verified-1.2.3.dist-info").rename(place / "broken-1.2.3.dist-info")
    for path in (place / "broken-1.2.3.dist-info").iterdir():
        path.write_text(
            path.read_text(encoding="utf-8").replace("verified", "broken"), encoding="utf-8"
        )
    manifest = place / "archives_that_are_broken" / "provider.json"
    manifest.write_text(json.dumps({"schema": 1, "core": core}), encoding="utf-8")
    report = valid(program(place, provided, "--json", status=1))
    assert [archive["intact"] for archive in report["archives"]] == [2]
    assert [p["name"] for p in report["providers"]][1:] == ["verified"]
    (defect,) = report["defects"]
    assert defect["reason"].startswith("broken 1.2.3")
    out = program(place, provided, status=1)
    assert "defect: broken 1.2.3" in out
    assert out.splitlines()[-1] == "2 of 2 binaries intact, 1 defect"


def test_compiled_again_to_the_same_bytes(provided: Path, program: Program) -> None:
    """In the processes that the program starts, and in one."""
    report = valid(shell(provided, "--rebuild", "--json"))
    (contents,) = report["archives"]
    assert (contents["identical"], contents["not_comparable"], report["rebuilt"]) == (2, 0, True)
    assert report["passed"]
    out = program(provided, "--rebuild")
    assert out.splitlines()[-1] == (
        "2 of 2 binaries intact, 2 of 2 compared are identical, 0 defects"
    )


def test_other_bytes_that_nothing_else_tells_of(
    provided: Path, compiled: dict[str, list[Entry]], program: Program
) -> None:
    contents, (first, second) = provided / CONTENTS, compiled["sm103"]
    changed = altered(first, first[1] + b"\0")
    archive.write(contents, SM103, [changed, altered(second, dynamic_shared=16)], {})
    record(provided)
    program(provided)  # it is as it says
    report = valid(program(provided, "--rebuild", "--json", status=1))
    assert (report["archives"][0]["intact"], report["archives"][0]["identical"]) == (2, 0)
    reasons = {defect["variant"]: defect["reason"] for defect in report["defects"]}
    assert f"compiled here has SHA-256 {first[0].sha256}" in reasons[str(FIRST)]
    assert changed[0].sha256 in reasons[str(FIRST)]
    assert reasons[str(SECOND)] == (
        "compiled here to the same bytes, but dynamic_shared is 0, installed 16"
    )


def test_another_compiler_is_no_mismatch(
    provided: Path, compiled: dict[str, list[Entry]], program: Program
) -> None:
    contents, (first, second) = provided / CONTENTS, compiled["sm103"]
    archive.write(contents, SM103, [altered(first, compiler="nvrtc 1.2.3"), second], {})
    record(provided)
    report = valid(program(provided, "--rebuild", "--json"))
    (entry,) = report["archives"]
    assert (entry["identical"], entry["not_comparable"]) == (1, 1)
    (other,) = report["not_comparable"]
    assert other["variant"] == str(FIRST)
    assert other["reason"] == f"made by nvrtc 1.2.3; here is {second[0].compiler}"
    archive.write(contents, SM103, [altered(first, compiler="nvrtc 1.2.3")], {})
    record(provided)
    out = program(provided, "--rebuild", status=2)
    here = f"made by nvrtc 1.2.3; here is {second[0].compiler}"
    assert f"not comparable: 1 of sm103, {here}" in out.splitlines()
    wanted = "nvidia-cuda-nvrtc-cu1==1.2.3"
    assert report["install"] == [wanted]
    assert f"to compare these, too: pip install {wanted}" in out.splitlines()


@pytest.mark.parametrize(
    ("compiler", "wanted"),
    [
        ("nvrtc 12.9.86", "nvidia-cuda-nvrtc-cu12==12.9.86"),
        ("nvrtc 13.0.88", "nvidia-cuda-nvrtc==13.0.88"),
        ("nvrtc 12.9", "nvidia-cuda-nvrtc-cu12==12.9.*"),
        ("triton 3.6.0", "triton==3.6.0"),
        ("imaginary 1.0", None),
    ],
)
def test_the_very_version_of_a_compiler(compiler: str, wanted: str | None) -> None:
    assert verify.requirement(compiler) == wanted


def compared(contents: Archive) -> list[verify.Comparison]:
    return list(verify.rebuild([(contents, binary) for binary in contents.binaries], workers=1))


def test_what_is_not_worth_compiling(
    install: Install,
    compiled: dict[str, list[Entry]],
    monkeypatch: pytest.MonkeyPatch,
    archive_parts: Any,
) -> None:
    first, second = compiled["sm103"]
    contents = install("sm103", [altered(first, source_sha256="ab" * 32), second])
    contents.path.write_bytes(archive_parts.flipped(contents.path.read_bytes()))
    other, damaged = compared(contents)
    assert (other.outcome, damaged.outcome) == ("not comparable", "not comparable")
    assert other.reason == "made from other sources or options"
    assert damaged.reason == "its bytes are damaged"
    monkeypatch.setattr(verify.jit, "toolchains", lambda: {"cuda": "NVRTC is not installed"})
    reasons = {comparison.reason for comparison in compared(contents)}
    assert reasons == {f"made by {first[0].compiler}; here: NVRTC is not installed"}


def test_a_compile_that_fails_is_a_mismatch(
    install: Install, compiled: dict[str, list[Entry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Entry:
        raise CompileError("no such intrinsic\non line 7")

    contents = install("sm103", compiled["sm103"])
    monkeypatch.setattr(verify, "compile_variant", fail)
    for comparison in compared(contents):
        assert comparison.outcome == "different"
        assert comparison.reason == "does not compile here: no such intrinsic\non line 7"


def test_looking_needs_neither_torch_nor_a_compiler() -> None:
    script = """
import sys
from scan_registry.cli import main
main(["cache", "list"])
main(["verify", "--arch", "sm86"])
heavy = {"torch", "triton", "numpy", "cuda"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], cwd="/", check=True, stdout=subprocess.DEVNULL)
