"""Release notes from the changelog."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import captured

from ci.notes import NotesError, notes, stated_version

ROOT = Path(__file__).parents[2]
SOURCE = '"""The version."""\n\n__version__ = "1.2.0"\n'
CHANGELOG = """# Changelog

## [Unreleased] 1.3.0

### Added

- more

## [1.2.0] - 2030-01-01

### Changed

- this

## [1.1.0] - 2029-01-01

- that
"""


def test_the_section_of_the_version() -> None:
    assert notes("v1.2.0", SOURCE, CHANGELOG) == "### Changed\n\n- this\n"
    assert notes("v1.1.0", SOURCE.replace("1.2.0", "1.1.0"), CHANGELOG) == "- that\n"


@pytest.mark.parametrize(
    ("tag", "version", "words"),
    [
        ("v1.2", "1.2.0", r"tag is v1\.2, but version\.py states 1\.2\.0"),
        ("v1.3.0", "1.3.0", r"make it `\[1\.3\.0\] - <date>`"),
        ("v2.0.0", "2.0.0", "no section"),
    ],
)
def test_what_has_no_notes(tag: str, version: str, words: str) -> None:
    with pytest.raises(NotesError, match=words):
        notes(tag, SOURCE.replace("1.2.0", version), CHANGELOG)


def test_this_changelog_speaks_of_this_version() -> None:
    version = stated_version((ROOT / "scan_registry" / "version.py").read_text(encoding="utf-8"))
    headings = [
        line
        for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
        if line[:3] == "## "
    ]
    assert headings[0] in (f"## [Unreleased] {version}", f"## [{version}]") or headings[
        0
    ].startswith(f"## [{version}] - ")


def test_an_error_is_one_line() -> None:
    script = ROOT / "ci" / "notes.py"
    result = captured([sys.executable, script, "v900.0"])
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: the tag is v900.0, but ")
