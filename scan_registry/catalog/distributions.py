"""Which distributions are installed, by the names of their metadata folders.

``importlib.metadata`` opens and parses every package's metadata to answer that, which takes longer
than the rest of a first call. The folders' names say it, too: ``<name>-<version>.dist-info``, by the
packaging specifications.

Not every such folder is a distribution. An installer that was killed leaves some whose names begin with
``~``, or that are empty; those without metadata that can be read are passed over. Where one folder holds
two of the same name, the one that states what it has installed is the one that is there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from scan_registry.base.frozen import dataclass

_SUFFIX = ".dist-info"
#: What begins with a letter or a digit, as names do, and states a version.
_FOLDER = re.compile(r"[^\W_][^-]*-\d.*\.dist-info").fullmatch
_SEPARATORS = re.compile(r"[-_.]+")


@dataclass(frozen=True)
class Distribution:
    """An installed distribution: normalized name, version, and the folder of its metadata."""

    name: str
    version: str
    folder: Path


def version(name: str) -> str | None:
    """The installed version of a distribution, or None if it is not installed."""
    distribution = next(named(normalized(name)), None)
    return distribution.version if distribution else None


def mentioning(group: str) -> list[Distribution]:
    """The distributions whose entry points mention ``group``. Of one name, the first on the path
    counts, as when it is imported."""
    sought, mentioned = group.encode(), []
    for place, entry in _entries():
        if sought in _entry_points(f"{place}/{entry}"):
            distribution = _distribution(place, entry)
            if next(named(distribution.name), None) == distribution:
                mentioned.append(distribution)
    return mentioned


def normalized(name: str) -> str:
    """A distribution's name as the packaging specifications compare it."""
    return _SEPARATORS.sub("-", name).lower()


def _entries() -> tuple[tuple[str, str], ...]:
    """Every metadata folder on the path: where it is, and its name."""
    # The import system passes over what is no text, too.
    return _listed(tuple(entry for entry in sys.path if isinstance(entry, str)))


@lru_cache(maxsize=1)
def _listed(path: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    entries: list[tuple[str, str]] = []
    for place in dict.fromkeys(entry or os.curdir for entry in path):
        try:
            names = os.listdir(place)
        except OSError:
            continue  # no folder, or not there: the import system passes over it, too
        entries += ((place, n) for n in sorted(filter(_FOLDER, names)))
    return tuple(entries)


def named(name: str) -> Iterator[Distribution]:
    """The distributions of a normalized name, in the order in which they count."""
    first = name.partition("-")[0]
    for _, entries in groupby(_entries(), itemgetter(0)):
        matches = []
        for place, entry in entries:
            if entry[: len(first)].lower() == first:
                distribution = _distribution(place, entry)
                if distribution.name == name and _is_there(distribution.folder):
                    matches.append(distribution)
        yield from sorted(matches, key=lambda match: not (match.folder / "RECORD").is_file())


def _is_there(folder: Path) -> bool:
    """Whether there is metadata that can be read, and that is not empty."""
    path = f"{folder}/METADATA"
    try:
        return os.stat(path).st_size > 0 and os.path.isfile(path) and os.access(path, os.R_OK)
    except OSError:
        return False


def _distribution(place: str, entry: str) -> Distribution:
    name, _, stated = entry[: -len(_SUFFIX)].partition("-")
    return Distribution(normalized(name), stated, Path(place, entry))


def _entry_points(folder: str) -> bytes:
    path = f"{folder}/entry_points.txt"
    # Most folders have no such file, and asking first takes less time than an exception. Reading a pipe would wait
    # for a writer.
    if not os.access(path, os.R_OK) or not os.path.isfile(path):
        return b""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := os.read(handle, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(handle)
