"""Sections: what an archive says of the binaries of one kernel in one language and dtype.

A section is a JSON document:

    {"chunks": [{"offset": …, "size": …}, …],       where the compressed binaries of its kernel lie
     "common": {…}, "binaries": [{…}, …]}           its entries; what they have in common is said once

The archive's manifest lists where each lies and its digest, so that a first call reads and checks the
one of its problem's dtype. It lists tunings, too, which are a document for each kernel and language.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from scan_registry.binary import Binary, read_count, read_target, read_text
from scan_registry.frozen import dataclass
from scan_registry.kernels.model import Variant
from scan_registry.target import Target

__all__ = ["ArchiveError", "Content", "Document", "Entry", "digest", "document", "parse_json"]


class ArchiveError(Exception):
    """A file that is not an intact archive; the message names the file and what is wrong."""


def parse_json(content: bytes) -> Any:
    """The document; ``ValueError`` also if it holds text that cannot be printed, as JSON's escapes
    allow."""
    document = json.loads(content)
    if b"\\u" in content:
        json.dumps(document, ensure_ascii=False).encode()
    return document


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


class Entry:
    """What an archive says of one binary. All of it is read only for one that is of use: a first call
    has no time for the others."""

    def __init__(self, record: Any, where: str) -> None:
        """``text`` is how its variant prints. ``ArchiveError``, which starts with ``where``, if what is
        given is no entry."""
        if not isinstance(record, Mapping):
            raise ArchiveError(f"{where}: {record!r} is not an object")
        self._record, self._where = record, where
        self.text = str(record.get("variant"))

    def __str__(self) -> str:
        return f"{self.text} for {self._record.get('target')}"

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
            return read_target(self._record.get("target"))
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
            chunk, offset = (read_count(n, self._record.get(n)) for n in ("chunk", "offset"))
            return Binary.from_json(self._record), (chunk, offset)
        except (ValueError, RecursionError) as error:
            raise ArchiveError(f"{self._where}: {error}") from error


@dataclass(frozen=True)
class Document:
    """Where a section lies, or what tuning found of a kernel. ``of`` is how the variants begin that it is
    about: a ``Variant.stem``, or a ``Variant.head``."""

    of: str
    offset: int
    size: int
    sha256: str

    @classmethod
    def read(cls, record: Any) -> Document:
        """``ValueError`` if it is none."""
        if not isinstance(record, Mapping):
            raise ValueError(f"{record!r} is not an object")
        return cls(
            read_text("of", record.get("of")),
            read_count("offset", record.get("offset")),
            read_count("size", record.get("size")),
            read_text("sha256", record.get("sha256")),
        )

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
    def read(cls, of: str, document: Any, file: Path) -> Content:
        """``ArchiveError`` names the file if it is none of variants that begin so."""
        where = f"{file}: the section {of}"
        common = document.get("common") if isinstance(document, dict) else None
        if not isinstance(common, dict) or not isinstance(document.get("binaries"), list):
            raise ArchiveError(f"{where} lists no binaries")
        entries = tuple(_listed(of, common, document["binaries"], file))
        try:
            return cls(tuple(map(_read_place, document["chunks"])), entries)
        except (KeyError, TypeError, ValueError) as error:
            raise ArchiveError(f"{where}: {error}") from error


def _listed(
    of: str, common: Mapping[str, Any], binaries: Iterable[Any], file: Path
) -> Iterator[Entry]:
    for number, own in enumerate(binaries):
        which = f"{file}: binary {number} of the section {of}"
        entry = Entry({**common, **own} if isinstance(own, dict) else own, which)
        if entry.text.partition(",")[0] != of:
            raise ArchiveError(f"{which} is {entry.text!r}")
        yield entry


def _read_place(record: Any) -> tuple[int, int]:
    if not isinstance(record, Mapping):
        raise ValueError(f"{record!r} is not an object")
    return read_count("offset", record.get("offset")), read_count("size", record.get("size"))


def document(
    records: Sequence[Mapping[str, Any]], chunks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A section: the entries, with what they have in common taken out of them, and where chunks are."""
    first, *others = records
    common = {
        name: value
        for name, value in first.items()
        if others and all(record[name] == value for record in others)
    }
    own = [{k: v for k, v in record.items() if k not in common} for record in records]
    return {"chunks": chunks, "common": common, "binaries": own}
