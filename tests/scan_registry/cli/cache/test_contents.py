"""``scan-registry cache list`` and ``clear``."""

from __future__ import annotations

from pathlib import Path

import pytest
from caching import Capture, add, document, only, paths, run, wanted

from scan_registry.cli.cache import age_text
from scan_registry.runtime import jit


def test_every_entry_is_listed(folder: Path, capsys: Capture) -> None:
    report = document(capsys, "list")
    assert (report["folder"], report["usable"], report["obstacle"]) == (str(folder), True, None)
    assert report["bytes"] == sum(path.stat().st_size for path in paths(folder))
    for entry, path in zip(report["entries"], paths(folder), strict=True):
        binary, _ = only(path)
        age = entry.pop("age")
        assert 0 <= age < 3600
        assert entry == {
            "path": str(path),
            "state": "current",
            "reason": None,
            "variant": str(binary.variant),
            "target": str(binary.target),
            "compiler": binary.compiler,
            "sha256": binary.sha256,
            "bytes": path.stat().st_size,
        }
    out = run(capsys, "list")
    assert out.startswith(f"folder {folder}\n")
    assert out.count("sm_103") == 2
    assert out.splitlines()[-1].startswith("3 binaries, ")
    compiler = only(paths(folder)[0])[0].compiler
    assert out.count(compiler) == 3


def test_damage_is_named_and_the_rest_is_listed(folder: Path, capsys: Capture) -> None:
    flipped, cut, moved = paths(folder)
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:100])
    other = folder / "ab" / ("ab" * 32)
    other.mkdir(parents=True)
    moved.rename(other / moved.name)
    report = document(capsys, "list", status=1)
    damaged = {entry["path"]: entry for entry in report["entries"]}
    assert {entry["state"] for entry in damaged.values()} == {"damaged"}
    assert "has SHA-256" in damaged[str(flipped)]["reason"]
    assert "the manifest's SHA-256" in damaged[str(cut)]["reason"]
    assert "its folder's name is another" in damaged[str(other / moved.name)]["reason"]
    assert damaged[str(cut)]["variant"] is None
    out = run(capsys, "list", status=1)
    assert f"damaged: {cut}: the manifest's SHA-256" in out


def test_what_the_sources_no_longer_give_is_stale(folder: Path, capsys: Capture) -> None:
    first, second, third = paths(folder)
    stale = {
        add(folder, first, source_sha256="ab" * 32): "is made with sources with SHA-256 abab",
        add(folder, second, options=("-O0",)): "is made with options -O0; this version's are ",
        add(folder, third, block=(32, 7, 1)): "is made with threads per block: 224",
    }
    report = document(capsys, "list")
    for entry in report["entries"]:
        path = Path(entry["path"])
        if path in stale:
            assert entry["state"] == "stale"
            assert stale[path] in entry["reason"]
        else:
            assert entry["state"] == "current"
    assert run(capsys, "list").count("\nstale: ") == 3


def test_why_a_folder_is_not_usable(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder.chmod(0o777)
    report = document(capsys, "list", status=1)
    assert not report["usable"]
    assert "others can write to it (mode 0777)" in report["obstacle"]
    assert "not usable: others can write to it" in run(capsys, "list", status=1)
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(file))
    assert document(capsys, "list", status=1)["obstacle"] == "it is not a folder"
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(file / "below"))
    assert not document(capsys, "list", status=1)["usable"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5.0, "0 min"), (61.0, "1 min"), (47.5 * 3600, "47 h"), (72.0 * 3600, "3 d")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_clear_says_how_much_it_deleted(folder: Path, capsys: Capture) -> None:
    size = sum(path.stat().st_size for path in paths(folder))
    report = document(capsys, "clear")
    assert report == {"folder": str(folder), "entries": 3, "bytes": size, "tuned": 0}
    assert paths(folder) == []
    assert run(capsys, "clear") == f"deleted 0 binaries, 0 B, from {folder}\n"
    variant, target = wanted()
    assert not jit.compile(variant, target).cached
    assert "deleted 1 binary, " in run(capsys, "clear")
