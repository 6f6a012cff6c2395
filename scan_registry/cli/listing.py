"""What is installed, read once and filtered: the rows behind the tables and the JSON alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scan_registry.archive import Archive, ArchiveError, Binary
from scan_registry.cli.errors import UsageError
from scan_registry.inventory import Catalogue
from scan_registry.target import Target


@dataclass(frozen=True)
class Listed:
    """One archive with those of its binaries that are wanted, or with what is wrong with it."""

    archive: Archive
    binaries: tuple[Binary, ...]
    damage: str | None = None


#: What a binary answers to, by the filter's name. A Triton binary in the archive ``sm90`` is made
#: for ``sm90a``; it answers to both.
FILTERS: Mapping[str, Callable[[Archive, Binary], list[str]]] = {
    "family": lambda archive, binary: [binary.variant.family],
    "kernel": lambda archive, binary: [binary.variant.kernel],
    "language": lambda archive, binary: [binary.variant.language],
    "dtype": lambda archive, binary: [
        str(value) for name, value in binary.variant.statics if name == "dtype"
    ],
    "arch": lambda archive, binary: [archive.arch.label, binary.target.label],
}


def read(catalogue: Catalogue) -> list[Listed]:
    """Every archive, with every byte checked against its digest."""
    listed = []
    for archive in catalogue.archives:
        try:
            for binary in archive.binaries:
                archive.read(binary)
            listed.append(Listed(archive, archive.binaries))
        except ArchiveError as error:
            listed.append(Listed(archive, (), str(error)))
    return listed


def narrow(listed: Iterable[Listed], wanted: Mapping[str, Sequence[str]]) -> list[Listed]:
    """The binaries that answer to one of the wanted values of every filter that has any.

    Archives of which nothing is left are left out; damaged ones stay. ``UsageError`` if a value
    names nothing installed.
    """
    listed = list(listed)
    filters = {name: _known(name, values, listed) for name, values in wanted.items() if values}

    def matches(archive: Archive, binary: Binary) -> bool:
        return all(
            not values.isdisjoint(FILTERS[name](archive, binary))
            for name, values in filters.items()
        )

    narrowed = [
        replace(entry, binaries=tuple(b for b in entry.binaries if matches(entry.archive, b)))
        for entry in listed
    ]
    return [entry for entry in narrowed if entry.binaries or entry.damage or not filters]


def _known(name: str, values: Sequence[str], listed: Sequence[Listed]) -> set[str]:
    """``values`` in the spelling of the installed ones."""
    installed = dict.fromkeys(
        value
        for entry in listed
        for binary in entry.binaries
        for value in FILTERS[name](entry.archive, binary)
    )
    known = set()
    for value in values:
        spelled = _arch_label(value) if name == "arch" else value
        if spelled not in installed:
            accepted = ", ".join(installed) or "none"
            raise UsageError(f"--{name} {value!r} is not installed; accepted are: {accepted}")
        known.add(spelled)
    return known


def _arch_label(text: str) -> str:
    """``sm90`` for every spelling of it; what is no architecture stays, to be refused by name."""
    try:
        return Target.parse(text).label
    except ValueError:
        return text
