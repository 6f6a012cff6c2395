"""Sections: what an archive says of the binaries of one kernel in one language and dtype.

A section is lines of JSON: a head, and a line for each binary with what only its entry says.

    {"chunks": [[offset, size], …],             where the compressed binaries of its family lie
     "common": {…},                             what the entries have in common
     "binaries": [[variant, target], …]}        of each entry, what selection compares; nothing else states it
    {…}
    …

The archive's manifest lists where each section lies and its digest, so that a first call reads and
checks the one of its problem's dtype, and of its lines the head and those of binaries that rank first.
The manifest lists tunings, too, which are a document for each kernel and language.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from scan_registry.artifact.binary import Binary, read_count, read_target
from scan_registry.base.frozen import dataclass
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Variant
from scan_registry.kernels.tuning import Tuning

__all__ = [
    "ArchiveError",
    "Content",
    "Document",
    "Entry",
    "digest",
    "dumped",
    "parse_json",
    "read_tunings",
    "section_text",
]


#: What a section's head states of each binary.
_NAMED = ("variant", "target")


class ArchiveError(Exception):
    """A file that is not an intact archive; the message names the file and what is wrong."""


def parse_json(content: bytes) -> Any:
    """The document; ``ValueError`` also if it holds text that cannot be printed, as JSON's escapes
    allow."""
    document = json.loads(content.decode())  # which is stricter than what ``loads`` does with bytes
    if b"\\u" in content:
        json.dumps(document, ensure_ascii=False).encode()
    return document


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


class Entry:
    """What an archive says of one binary. All fields are read only for the entries that a call considers, to keep
    first calls short.

    ``text`` is how its variant prints, and errors start with ``where``."""

    def __init__(
        self, text: str, target: str, common: Mapping[str, Any], line: bytes, where: str
    ) -> None:
        self.text, self._target = text, target
        self._common, self._line, self._where = common, line, where

    def __str__(self) -> str:
        return f"{self.text} for {self._target}"

    @property
    def language(self) -> str:
        return self.text.split(":")[1]

    @cached_property
    def variant(self) -> Variant:
        """``ArchiveError`` if it names none."""
        try:
            variant = Variant.parse(self.text)
            if str(variant) != self.text:
                raise ValueError(f"{self.text!r} is not how {variant} prints")
        except ValueError as error:
            raise ArchiveError(f"{self._where}: {error}") from error
        return variant

    @property
    def target(self) -> Target:
        """``ArchiveError`` if it names none."""
        try:
            return read_target(self._target)
        except ValueError as error:
            raise ArchiveError(f"{self._where}: {error}") from error

    @property
    def binary(self) -> Binary:
        """All of it; ``ArchiveError`` if something in the entry is not of its type."""
        return self._read[0]

    @property
    def place(self) -> tuple[int, int]:
        """The number of the chunk it is in, and the offset there; ``ArchiveError`` likewise."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[Binary, tuple[int, int]]:
        _ = self.variant  # an error if it names none
        try:
            own = parse_json(self._line)
            if not isinstance(own, dict):
                raise ValueError(f"{own!r} is not an object")
            stated = {**self._common, **own}
            if not stated.keys().isdisjoint(_NAMED):
                raise ValueError("it states its variant or target again")
            record = {**stated, "variant": self.text, "target": self._target}
            chunk, offset = (read_count(n, record.get(n)) for n in ("chunk", "offset"))
            return Binary.from_json(record), (chunk, offset)
        except (ValueError, RecursionError) as error:
            raise ArchiveError(f"{self._where}: {error}") from error


@dataclass(frozen=True)
class Document:
    """Where a section lies, or what tuning found of a kernel. ``of`` is how the variants begin that it is
    about: a ``Variant.stem``, or a ``Variant.head``. Prints as the manifest lists it."""

    of: str
    offset: int
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.of}: {self.offset} {self.size} {self.sha256}"

    @classmethod
    def read(cls, stated: str) -> Document:
        """What prints so; ``ValueError`` if none does."""
        of, _, rest = stated.partition(": ")
        match rest.split(" "):
            case [offset, size, sha256] if (
                offset.isdecimal() and size.isdecimal() and rest.isascii()
            ):
                start, length = read_count("offset", int(offset)), read_count("size", int(size))
                return cls(of, start, length, sha256)
        raise ValueError(f"{stated!r} does not say of what it is, an offset, a size and a SHA-256")

    @property
    def dtype(self) -> str | None:
        """Of a section, unless its kernel has none."""
        name, _, value = self.of.rpartition(":")[2].partition("=")
        return value if name == "dtype" else None


@dataclass(frozen=True)
class Content:
    """What a section says. ``chunks`` are offset and size of each."""

    chunks: tuple[tuple[int, int], ...]
    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, of: str, section: bytes, file: Path) -> Content:
        """``ArchiveError`` names the file if it is none of variants that begin so."""
        where = f"{file}: the section {of}"
        head, *lines = section.split(b"\n")
        try:
            said = parse_json(head)
        except (ValueError, RecursionError) as error:
            raise ArchiveError(f"{where} is not JSON: {error}") from error
        common = said.get("common") if isinstance(said, dict) else None
        listed = said.get("binaries") if isinstance(said, dict) else None
        if not isinstance(common, dict) or not isinstance(listed, list):
            raise ArchiveError(f"{where} lists no binaries")
        if len(listed) != len(lines):
            raise ArchiveError(f"{where} lists {len(listed)} binaries and has {len(lines)} entries")
        entries = tuple(_listed(of, common, zip(listed, lines, strict=True), file))
        try:
            return cls(tuple(map(_read_place, said["chunks"])), entries)
        except (KeyError, TypeError, ValueError) as error:
            raise ArchiveError(f"{where}: {error}") from error


def _listed(
    of: str, common: Mapping[str, Any], binaries: Iterable[tuple[Any, bytes]], file: Path
) -> Iterator[Entry]:
    start, end = f"{file}: binary", f"of the section {of}"
    for number, (named, line) in enumerate(binaries):
        where = f"{start} {number} {end}"
        if not (
            isinstance(named, list)
            and list(map(type, named)) == [str, str]
            and named[0].partition(",")[0] == of
        ):
            raise ArchiveError(f"{where} is {named!r}")
        text, target = named
        yield Entry(text, target, common, line, where)


def _read_place(listed: Any) -> tuple[int, int]:
    offset, size = listed
    return read_count("offset", offset), read_count("size", size)


def read_tunings(of: str, content: bytes, file: Path) -> tuple[Tuning, ...]:
    """What tuning found of a kernel; ``ArchiveError`` names the file if it is nothing of that kind."""
    try:
        listed = parse_json(content)
        if not isinstance(listed, list):
            raise ValueError(f"{listed!r} is not a list")
        return tuple(map(Tuning.from_json, listed))
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{file}: the tunings of {of}: {error}") from error


def section_text(records: Sequence[Mapping[str, Any]], chunks: Sequence[tuple[int, int]]) -> bytes:
    """A section of entries, with where chunks are."""
    first, *others = records
    common = {
        name: value
        for name, value in first.items()
        if others and name not in _NAMED and all(record[name] == value for record in others)
    }
    listed = [[record[name] for name in _NAMED] for record in records]
    own = [{k: v for k, v in record.items() if k not in (*_NAMED, *common)} for record in records]
    head = {"chunks": chunks, "common": common, "binaries": listed}
    return b"\n".join(map(dumped, (head, *own)))


def dumped(document: Any) -> bytes:
    """A document as archives hold it: without spaces, in one line, and always the same bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
