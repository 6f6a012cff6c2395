"""Packing: where archives go, and what they say of where they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from changing import changed
from processes import captured

from scan_registry.aot import pack as packing
from scan_registry.aot.pack import pack, provenance, tunings
from scan_registry.artifact.archive import Archive, Binary
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.tuning import Row, Tuning

Make = Callable[..., tuple[Binary, bytes]]


@pytest.fixture(autouse=True)
def no_commit_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCAN_REGISTRY_COMMIT", raising=False)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    result = captured(["git", *identity, *words], cwd=folder, check=True)
    return result.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "file").write_text("first", encoding="utf-8")
    git(folder, "add", "file")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.mark.parametrize("arch", ["sm90a", "ptx80"])
def test_an_archive_is_named_after_its_arch(tmp_path: Path, a_binary: Make, arch: str) -> None:
    target = Target.parse(arch)
    entries = [a_binary(variant, target) for variant in FAMILY.variants()[:3]]
    path = pack(tmp_path / "new" / "folder", target, entries, {"version": "1", "commit": None})
    assert path == tmp_path / "new" / "folder" / f"{arch}.scanreg"
    packed = Archive(path)
    assert packed.arch == target
    assert [(binary, packed.read(binary)) for binary in packed.binaries] == entries
    assert (packed.manifest["version"], packed.manifest["commit"]) == ("1", None)


def test_packing_again_replaces(tmp_path: Path, a_binary: Make) -> None:
    target = Target.parse("sm90")
    for variants in (FAMILY.variants()[:3], FAMILY.variants()[3:4]):
        path = pack(tmp_path, target, [a_binary(v, target) for v in variants], {})
        assert [binary.variant for binary in Archive(path).binaries] == list(variants)
    assert list(tmp_path.iterdir()) == [path]


def test_a_clean_repository(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    (repository / "untracked").write_text("does not count", encoding="utf-8")
    expected = {"version": "1.2.3", "commit": head, "dirty": False}
    assert provenance(repository, "1.2.3") == expected


@pytest.mark.parametrize("staged", [False, True])
def test_a_changed_repository_is_dirty(repository: Path, staged: bool) -> None:
    (repository / "file").write_text("second", encoding="utf-8")
    if staged:
        git(repository, "add", "file")
    assert provenance(repository, "1")["dirty"] is True


def test_no_repository(tmp_path: Path) -> None:
    assert provenance(tmp_path, "1") == {"version": "1", "commit": None, "dirty": None}


def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert provenance(tmp_path, "1") == {"version": "1", "commit": None, "dirty": None}


def test_a_folder_inside_another_repository(repository: Path) -> None:
    """An unpacked sdist inside some checkout does not come from that checkout's commit."""
    (repository / "unpacked").mkdir()
    assert provenance(repository / "unpacked", "1")["commit"] is None


def test_a_commit_that_is_given(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCAN_REGISTRY_COMMIT", "f" * 40)
    assert provenance(repository, "1") == {"version": "1", "commit": "f" * 40, "dirty": None}


def test_no_git(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance(repository, "1") == {"version": "1", "commit": None, "dirty": None}


def test_machine_code_gets_the_nearest_tuning_and_ptx_all(monkeypatch: pytest.MonkeyPatch) -> None:
    label = FAMILY.kernels[0].label(FAMILY.kernels[0].every[0])
    rows = {"kind": [Row({"time": 1}, {label: 1.0})]}
    every = tuple(Tuning.of(arch, "x", "d", rows) for arch in ("sm_80", "sm_90"))
    kernel = changed(FAMILY.kernels[0], tunings=lambda: every, timings=lambda: every)
    untuned = changed(FAMILY.kernels[1], tunings=tuple, timings=tuple)
    family = replace(FAMILY, kernels=(kernel, untuned))
    monkeypatch.setattr(packing, "families", lambda: {family.name: family})
    for arch, expected in (
        ("sm90", ["sm_90"]),
        ("sm86", ["sm_80"]),
        ("sm120", ["sm_90"]),
        ("ptx80", ["sm_80", "sm_90"]),
    ):
        actual = tunings(Target.parse(arch))
        assert [*actual] == [kernel.head]
        assert [tuning.arch for tuning in actual[kernel.head]] == expected
