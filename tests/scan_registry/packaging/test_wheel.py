"""Wheels as values: read, changed, written."""

from __future__ import annotations

import csv
import io
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

import pytest

from scan_registry.packaging.wheel import Wheel

METADATA = b"Metadata-Version: 2.1\nName: a-pkg\nVersion: 1.0\n\nVersion: 1.0 of it\n"
SMALL = Wheel(
    "a_pkg",
    "1.0",
    "py3-none-any",
    {"a_pkg/__init__.py": b"", "a_pkg/run": b"#!", "a_pkg/data/x": b"x" * 999},
    {"METADATA": METADATA, "WHEEL": b"Wheel-Version: 1.0\n", "licenses/LICENSE": b"free"},
    frozenset({"a_pkg/run"}),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = SMALL.write(tmp_path)
    assert path.name == "a_pkg-1.0-py3-none-any.whl"
    assert Wheel.read(path) == SMALL
    again = Wheel.read(path).write(tmp_path / "again")
    assert again.read_bytes() == path.read_bytes()


def test_the_record_states_every_other_file(tmp_path: Path) -> None:
    path = SMALL.with_files({"a_pkg/more": b"more"}).write(tmp_path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        assert names[-1] == "a_pkg-1.0.dist-info/RECORD"
        rows = list(csv.reader(io.StringIO(archive.read(names[-1]).decode())))
        assert [row[0] for row in rows] == names
        assert rows[-1][1:] == ["", ""]
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            encoded = urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={encoded}", len(content))
        modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
    assert modes["a_pkg/run"] == 0o755
    assert modes["a_pkg/more"] == 0o644


def test_another_version_is_in_the_name_and_the_metadata() -> None:
    changed = SMALL.with_version("1.0+cu129")
    assert changed.file_name == "a_pkg-1.0+cu129-py3-none-any.whl"
    metadata = changed.information["METADATA"]
    assert metadata == METADATA.replace(b"Version: 1.0\n\n", b"Version: 1.0+cu129\n\n", 1)
    assert changed.with_version("1.0") == SMALL


def test_without_a_folder() -> None:
    assert list(SMALL.without("a_pkg/data").files) == ["a_pkg/__init__.py", "a_pkg/run"]
    assert SMALL.without("a_pkg/dat") == SMALL


@pytest.mark.parametrize("name", ["a_pkg-1.0.whl", "a_pkg-1.0-py3-none-any.zip", "x.whl"])
def test_a_name_that_is_no_wheels(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not named"):
        Wheel.read(tmp_path / name)


@pytest.mark.parametrize("missing", ["METADATA", "WHEEL", "RECORD"])
def test_what_a_wheel_must_have(tmp_path: Path, missing: str) -> None:
    whole = SMALL.write(tmp_path)
    partial = tmp_path / "partial" / whole.name
    partial.parent.mkdir()
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(partial, "w") as target:
        for name in source.namelist():
            if not name.endswith(missing):
                target.writestr(name, source.read(name))
    with pytest.raises(ValueError, match=missing):
        Wheel.read(partial)
