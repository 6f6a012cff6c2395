"""The release notes of a tag: the section of CHANGELOG.md about its version.

    python3 ci/notes.py v0.1.0

Fails if the tag is not the version in scan_registry/version.py, or the changelog has no section for it, or still
calls it unreleased.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class NotesError(Exception):
    """Why a tag cannot be released; the message says what to change."""


def stated_version(source: str) -> str:
    """The version in version.py, of which ``source`` is the text; the only place that states it."""
    (version,) = _VERSION.findall(source)
    return str(version)


def notes(tag: str, source: str, changelog: str) -> str:
    """The changelog's section, without its heading; ``NotesError`` if there can be no release."""
    version = stated_version(source)
    if tag != f"v{version}":
        raise NotesError(f"the tag is {tag}, but version.py states {version}: tag v{version}")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, text = section.partition("\n")
        if heading.startswith(f"[{version}]"):
            return text.strip() + "\n"
        if version in heading.split():
            raise NotesError(
                f"CHANGELOG.md still has {heading!r}; make it `[{version}] - <date>` to release it"
            )
    raise NotesError(f"CHANGELOG.md has no section [{version}]")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python3 ci/notes.py TAG", file=sys.stderr)
        return 2
    source, changelog = (ROOT / name for name in ("scan_registry/version.py", "CHANGELOG.md"))
    try:
        print(
            notes(
                sys.argv[1],
                source.read_text(encoding="utf-8"),
                changelog.read_text(encoding="utf-8"),
            ),
            end="",
        )
    except NotesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
