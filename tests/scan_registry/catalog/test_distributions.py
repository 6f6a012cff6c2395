"""Which distributions are installed: the same answers as importlib.metadata's, without its cost."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path

import pytest

from scan_registry.catalog import distributions


def install(folder: Path, name: str, version: str, entry_points: str | None = None) -> Path:
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    if entry_points is not None:
        (place / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    return place


def test_versions_agree_with_importlib_metadata() -> None:
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        folder = getattr(distribution, "_path", Path())
        if name and re.fullmatch(r".*\.dist-info", str(folder)):
            assert distributions.version(name) == importlib.metadata.version(name)


def test_what_is_not_installed_has_no_version() -> None:
    assert distributions.version("no-such-thing") is None


@pytest.mark.parametrize("name", ["Nvidia-made.up"])
def test_names_compare_normalized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(tmp_path, "nvidia_made_up", "1.2.3")
    install(tmp_path, "nvidia_made_up_more", "9.9")
    monkeypatch.syspath_prepend(tmp_path)
    assert distributions.version(name) == "1.2.3"


def test_the_first_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the later one has the entry point and the first has not."""
    points = "[made.up.group]\na = b\n"
    install(tmp_path / "first", "shadowed", "1.0")
    install(tmp_path / "second", "shadowed", "2.0", points)
    install(tmp_path / "second", "other", "3.0", points)
    install(tmp_path / "second", "silent", "4.0", "[another.group]\na = b\n")
    monkeypatch.syspath_prepend(tmp_path / "second")
    monkeypatch.syspath_prepend(tmp_path / "first")
    monkeypatch.syspath_prepend(tmp_path / "not-there")
    assert distributions.version("shadowed") == "1.0"
    result = distributions.mentioning("made.up.group")
    assert [(item.name, item.version) for item in result] == [("other", "3.0")]
    assert result[0].folder == tmp_path / "second" / "other-3.0.dist-info"


@pytest.mark.parametrize(
    "left", ["empty", "unreadable", "nothing in it", "broken link", "~", "no version"]
)
def test_what_is_no_distribution_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """What stays behind where an installer was killed hides nothing, and is nothing."""
    points = "[made.up.group]\na = b\n"
    install(tmp_path, "made_up", "2.0", points)
    if left == "~":
        install(tmp_path, "~de_up", "1.0", points)
    elif left == "no version":
        install(tmp_path, "made_up", "1.0", points).rename(tmp_path / "made_up.dist-info")
    elif left == "broken link":
        (tmp_path / "made_up-1.0.dist-info").symlink_to(tmp_path / "gone")
    else:
        place = install(tmp_path, "made_up", "1.0", points)
        (place / "METADATA").unlink()
        if left == "empty":
            (place / "entry_points.txt").unlink()
        elif left == "unreadable":
            (place / "METADATA").mkdir()
        else:
            (place / "METADATA").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert distributions.version("made-up") == "2.0"
    result = distributions.mentioning("made.up.group")
    assert [(item.name, item.version) for item in result] == [("made-up", "2.0")]


@pytest.mark.parametrize("other", ["1.0", "3.0"])
def test_of_two_in_one_folder_the_one_with_a_record_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    points = "[made.up.group]\na = b\n"
    (install(tmp_path, "made_up", "2.0", points) / "RECORD").write_text("", encoding="utf-8")
    install(tmp_path, "made_up", other)
    monkeypatch.syspath_prepend(tmp_path)
    assert distributions.version("made-up") == "2.0"
    assert [item.version for item in distributions.mentioning("made.up.group")] == ["2.0"]


def test_what_is_no_file_and_no_text_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (install(tmp_path, "folder", "1.0") / "entry_points.txt").mkdir()
    os.mkfifo(install(tmp_path, "pipe", "1.0") / "entry_points.txt")
    install(tmp_path, "usual", "1.0", "[made.up.group]\na = b\n")
    monkeypatch.setattr(sys, "path", [*sys.path, bytes(tmp_path), str(tmp_path)])
    assert [item.name for item in distributions.mentioning("made.up.group")] == ["usual"]
