"""What is installed, read once and filtered: the rows behind the tables and the JSON alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scan_registry.artifact.archive import Archive, ArchiveError, Binary
from scan_registry.base.suggestion import suggestion
from scan_registry.catalog.inventory import Catalogue
from scan_registry.cli.errors import UsageError
from scan_registry.cli.gpus import product_of
from scan_registry.hardware.products import names
from scan_registry.hardware.target import Target
from scan_registry.ops.operator import SHORT_DTYPES


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
_EXAMPLES = {
    "family": "the name of its folder",
    "kernel": "such as time_last_forward",
    "language": "cuda or triton",
    "dtype": "such as bfloat16",
    "arch": "such as sm90, sm_90, ptx80, or a GPU's name, such as H100",
}


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Declare one argument for each filter; it may be given more than once."""
    for name in FILTERS:
        parser.add_argument(
            f"--{name}", action="append", default=[], metavar="X", help=_EXAMPLES[name]
        )


def filters_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """The values that were given, by the filter's name."""
    return {name: getattr(args, name) for name in FILTERS}


def opened(catalogue: Catalogue) -> list[Listed]:
    """Every archive, with its manifest checked; the binaries' bytes are not read."""
    listed = []
    for archive in catalogue.archives:
        try:
            listed.append(Listed(archive, archive.binaries))
        except ArchiveError as error:
            listed.append(Listed(archive, (), str(error)))
    return listed


def read(catalogue: Catalogue) -> list[Listed]:
    """Every archive, with every byte checked against its digest."""
    listed = []
    for entry in opened(catalogue):
        try:
            read_one = entry.archive.reader()
            for binary in entry.binaries:
                read_one(binary)
            listed.append(entry)
        except ArchiveError as error:
            listed.append(Listed(entry.archive, (), str(error)))
    return listed


def several_providers(listed: Iterable[Listed]) -> bool:
    """Whether a table has to say which package brought an archive."""
    return len({entry.archive.provider for entry in listed}) > 1


def size_text(size: int | None) -> str:
    """``10.3 kB``; ``?`` for what has no size."""
    if size is None:
        return "?"
    if size < 1000:
        return f"{size} B"
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.2f} MB"


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
        spelled = _SPELLED[name](value) if name in _SPELLED else value
        if spelled not in installed:
            also = names() if name == "arch" else ()
            raise UsageError(
                not_there(f"--{name}", value, spelled, "installed", [*installed], also)
            )
        known.add(spelled)
    return known


def not_there(
    option: str,
    value: str,
    spelled: str,
    where: str,
    accepted: Sequence[str],
    also: Sequence[str] = (),
) -> str:
    """The message about a value of an option that names nothing. ``spelled`` is what was looked for, and ``also`` has other
    spellings that may be meant."""
    if option == "--arch" and spelled != value:
        return f"no archive of {spelled} ({value}) is {where}; {where} are {', '.join(accepted) or 'none'}"
    meant = f" ({spelled})" if spelled != value else ""
    guess = suggestion(value, [*accepted, *also])
    words = f"{', '.join(accepted) or 'none'}{f'; {guess}' if guess else ''}"
    return f"{option} {value!r}{meant} is not {where}; accepted are: {words}"


def arch_label(text: str) -> str:
    """``sm90`` for every spelling of it, its compute capability, and the names of its GPUs; what is none of these stays,
    to be refused by name."""
    try:
        return Target.parse(text).label
    except ValueError:
        pass
    try:
        capability, _, _ = product_of(text)
    except UsageError:
        return text
    return Target(capability).label


_LONG = {short: name for name, short in SHORT_DTYPES.items()}
#: How values of a filter that may be spelled in several ways are spelled where they are installed.
_SPELLED: Mapping[str, Callable[[str], str]] = {
    "arch": arch_label,
    "dtype": lambda text: _LONG.get(text, text),
}
