"""Archives: the binaries of one architecture and what describes them, in one file.

Layout, little-endian:

    offset 0    8 bytes   magic "SCANREG" and the format's number
           8    8         length of the manifest
          16   32         SHA-256 of the manifest
          48   …          the manifest, UTF-8 JSON
           …   …          chunks: neighbouring binaries of one section, compressed together (raw LZMA2)
           …   …          sections, UTF-8 JSON: the entries of one kernel in one language each

The manifest gives the offset, size and SHA-256 of each section; a section lists its chunks, and an
entry the chunk its binary is in, where it starts once that is decompressed, its size and SHA-256.
Offsets in the file count from the end of the manifest. So a first call reads and checks the entries
of its kernel and decompresses one chunk as far as its binary, however many there are. Binaries of one
kernel are much alike, which is why they share a chunk; a chunk is small, which is what bounds the
time to get at its last binary. What all entries of a section have in common, the section says once;
where the kernel was tuned, it holds its tunings, too. Nothing in a file is believed before its digest
is checked: every defect raises :class:`ArchiveError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from scan_registry import chunks
from scan_registry.binary import Binary, read_count, read_text
from scan_registry.frozen import dataclass
from scan_registry.kernels.model import Variant, pinned
from scan_registry.kernels.tuning import Tuning
from scan_registry.target import Target

__all__ = [
    "MAGIC",
    "SCHEMA",
    "SUFFIX",
    "Archive",
    "ArchiveError",
    "Binary",
    "Entry",
    "digest",
    "parse_json",
    "write",
]

MAGIC = b"SCANREG\x03"
SCHEMA = 4
SUFFIX = ".scanreg"
_HEADER = struct.Struct("<8sQ32s")


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


def write(
    path: Path,
    arch: Target,
    binaries: Iterable[tuple[Binary, bytes]],
    provenance: Mapping[str, Any],
    tunings: Mapping[str, Sequence[Tuning]] | None = None,
) -> None:
    """Write an archive in one step: readers see the old file or the new one, never a part.

    ``provenance`` is the package's version and source commit. Binaries keep their order; equal
    bytes are stored once. ``tunings`` go by how their kernel's variants begin; without binaries of
    it, they are left out.
    """
    parts: list[bytes] = []
    end = 0

    def place(part: bytes) -> dict[str, Any]:
        nonlocal end
        parts.append(part)
        end += len(part)
        return {"offset": end - len(part), "size": len(part)}

    documents = []
    for of, group in groupby(binaries, lambda pair: pair[0].variant.head):
        tuned = (tunings or {}).get(of, ())
        records, contents = _in_chunks(group, tuned)
        places = [place(chunks.compress(content)) for content in contents]
        documents.append((of, _section(records, places, tuned)))
    sections = []
    for of, document in documents:
        content = _dumped(document)
        sections.append({"of": of, "sha256": digest(content), **place(content)})
    manifest = _dumped({"schema": SCHEMA, "arch": str(arch), **provenance, "sections": sections})
    header = _HEADER.pack(MAGIC, len(manifest), hashlib.sha256(manifest).digest())
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header + manifest)
            file.writelines(parts)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _in_chunks(
    binaries: Iterable[tuple[Binary, bytes]], tunings: Sequence[Tuning]
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """What a section says of each binary, and what is to be in its chunks, where those of like size are
    together, which are most alike; equal bytes are once. In a chunk, whose end takes longest to read, first
    come those that tuning found to be the fastest most often; of kernels without tuning all are in order."""
    held, members, room = [*binaries], list[dict[str, tuple[Binary, bytes]]](), 0
    for binary, content in sorted(held, key=lambda pair: len(pair[1])):
        if digest(content) != binary.sha256:
            raise ValueError(f"the bytes of {binary.variant} do not have the digest it states")
        if any(binary.sha256 in each for each in members):
            continue
        if not members or room < len(content):
            members.append({})
            room = chunks.SIZE
        members[-1][binary.sha256] = binary, content
        room -= len(content)
    wins = sum((tuning.wins() for tuning in tunings), Counter[str]())
    places, contents = dict[str, dict[str, int]](), []
    for number, each in enumerate(members):
        parts = [*each.values()] if wins else [pair for pair in held if pair in each.values()]
        parts.sort(key=lambda pair: -wins[pinned(pair[0].variant.statics)])
        ends = accumulate((len(content) for _, content in parts), initial=0)
        for (binary, _), offset in zip(parts, ends, strict=False):
            places[binary.sha256] = {"chunk": number, "offset": offset}
        contents.append(b"".join(content for _, content in parts))
    return [{**binary.to_json(), **places[binary.sha256]} for binary, _ in held], contents


def _section(
    records: Sequence[Mapping[str, Any]],
    places: Sequence[Mapping[str, Any]],
    tunings: Sequence[Tuning],
) -> dict[str, Any]:
    """The entries, with what they have in common taken out of them, where their chunks are, and the
    tunings if there are any."""
    first, *others = records
    common = {
        name: value
        for name, value in first.items()
        if others and all(record[name] == value for record in others)
    }
    own = [{k: v for k, v in record.items() if k not in common} for record in records]
    tuned = {"tunings": [asdict(tuning) for tuning in tunings]} if tunings else {}
    return {"chunks": places, "common": common, "binaries": own, **tuned}


def _dumped(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


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
class _Section:
    """Where the entries of one kernel in one language lie: ``of`` is how their variants begin."""

    of: str
    offset: int
    size: int
    sha256: str

    @classmethod
    def read(cls, record: Any) -> _Section:
        if not isinstance(record, Mapping):
            raise ValueError(f"{record!r} is not an object")
        return cls(
            read_text("of", record.get("of")),
            read_count("offset", record.get("offset")),
            read_count("size", record.get("size")),
            read_text("sha256", record.get("sha256")),
        )


#: Chunks that are being read, by their section and their number there.
_Chunks = dict[tuple[_Section, int], chunks.Opened]


def _read_place(record: Any) -> tuple[int, int]:
    if not isinstance(record, Mapping):
        raise ValueError(f"{record!r} is not an object")
    return read_count("offset", record.get("offset")), read_count("size", record.get("size"))


@dataclass(frozen=True)
class _Content:
    """What a section says. ``chunks`` are offset and size of each."""

    chunks: tuple[tuple[int, int], ...]
    entries: tuple[Entry, ...]
    tunings: tuple[Tuning, ...]


class Archive:
    """A file of binaries, opened lazily: constructing one reads nothing.

    ``provider`` is the name of the package that brought it.
    """

    def __init__(self, path: Path, provider: str = "scan-registry") -> None:
        self.path = path
        self.provider = provider

    def __repr__(self) -> str:
        return f"Archive({str(self.path)!r})"

    @cached_property
    def arch(self) -> Target:
        """The architecture that the file's name promises; checked when the manifest is read."""
        try:
            return Target.parse(self.path.name.removesuffix(SUFFIX))
        except ValueError as error:
            raise ArchiveError(f"{self.path}: the file's name is not an architecture's") from error

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest, checked against its digest."""
        header = self._bytes(0, _HEADER.size)
        if len(header) < _HEADER.size:
            raise ArchiveError(f"{self.path}: {len(header)} bytes are no archive")
        magic, length, expected = _HEADER.unpack(header)
        if magic != MAGIC:
            raise ArchiveError(f"{self.path}: starts with {magic!r}; this version reads {MAGIC!r}")
        content = self._bytes(_HEADER.size, length)
        if hashlib.sha256(content).digest() != expected:
            raise ArchiveError(
                f"{self.path}: the manifest's SHA-256 is {digest(content)}, "
                f"the header states {expected.hex()}"
            )
        manifest = self._parsed("the manifest", content)
        if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
            stated = manifest.get("schema") if isinstance(manifest, dict) else manifest
            raise ArchiveError(
                f"{self.path}: manifest schema {stated!r}; this version reads {SCHEMA}"
            )
        if manifest.get("arch") != str(self.arch):
            raise ArchiveError(
                f"{self.path}: holds {manifest.get('arch')}, its name says {self.arch}"
            )
        manifest["start"] = _HEADER.size + length
        return manifest

    @cached_property
    def binaries(self) -> tuple[Binary, ...]:
        """What the archive holds, in the spec's order; ``ArchiveError`` if any entry is not right."""
        return tuple(entry.binary for section in self._sections for entry in self._entries(section))

    def of(self, family: str, kernel: str) -> tuple[Entry, ...]:
        """The entries of one kernel's variants; the others remain unread."""
        prefix = f"{family}.{kernel}:"
        return tuple(
            entry
            for section in self._sections
            if section.of.startswith(prefix)
            for entry in self._entries(section)
        )

    def tunings(self, head: str) -> tuple[Tuning, ...]:
        """What tuning found of a kernel in a language, given by how its variants begin."""
        return tuple(
            tuning
            for section in self._sections
            if section.of == head
            for tuning in self._section(section).tunings
        )

    @cached_property
    def _sections(self) -> tuple[_Section, ...]:
        listed = self.manifest.get("sections")
        if not isinstance(listed, list):
            raise ArchiveError(f"{self.path}: the manifest lists no sections")
        try:
            return tuple(map(_Section.read, listed))
        except ValueError as error:
            raise ArchiveError(f"{self.path}: the manifest's sections: {error}") from error

    def _entries(self, section: _Section) -> tuple[Entry, ...]:
        return self._section(section).entries

    def _section(self, section: _Section) -> _Content:
        if section not in self._read_sections:
            self._read_sections[section] = self._read_section(section)
        return self._read_sections[section]

    @cached_property
    def _read_sections(self) -> dict[_Section, _Content]:
        return {}

    def _read_section(self, section: _Section) -> _Content:
        name = f"the section {section.of}"
        content = self._bytes(self.manifest["start"] + section.offset, section.size)
        if digest(content) != section.sha256:
            raise ArchiveError(
                f"{self.path}: {name} has SHA-256 {digest(content)}, "
                f"the manifest states {section.sha256}"
            )
        document = self._parsed(name, content)
        common = document.get("common") if isinstance(document, dict) else None
        if not isinstance(common, dict) or not isinstance(document.get("binaries"), list):
            raise ArchiveError(f"{self.path}: {name} lists no binaries")
        entries = tuple(self._listed(section, common, document["binaries"]))
        try:
            places = tuple(map(_read_place, document["chunks"]))
            tunings = tuple(map(Tuning.from_json, document.get("tunings", ())))
        except (KeyError, TypeError, ValueError) as error:
            raise ArchiveError(f"{self.path}: {name}: {error}") from error
        return _Content(places, entries, tunings)

    def _listed(
        self, section: _Section, common: Mapping[str, Any], binaries: Iterable[Any]
    ) -> Iterator[Entry]:
        for number, own in enumerate(binaries):
            where = f"{self.path}: binary {number} of the section {section.of}"
            entry = Entry({**common, **own} if isinstance(own, dict) else own, where)
            if entry.text.rpartition(":")[0] != section.of:
                raise ArchiveError(f"{where} is {entry.text!r}")
            yield entry

    def _parsed(self, name: str, content: bytes) -> Any:
        try:
            return parse_json(content)
        except (ValueError, RecursionError) as error:
            raise ArchiveError(f"{self.path}: {name} is not JSON: {error}") from error

    def _bytes(self, start: int, size: int) -> bytes:
        """A part of the file: less than ``size`` bytes if it ends before."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read(min(size, os.fstat(file.fileno()).st_size))
        except (OSError, OverflowError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ArchiveError(f"{self.path}: {reason}") from error

    def read(self, binary: Binary) -> bytes:
        """The bytes of ``binary``, checked against its digest."""
        return self._find(binary, {})

    def reader(self) -> Callable[[Binary], bytes]:
        """``read`` for many binaries, one after the other: it decompresses no chunk twice, and keeps all
        of them meanwhile."""
        opened: _Chunks = {}
        return lambda binary: self._find(binary, opened)

    def _find(self, binary: Binary, opened: _Chunks) -> bytes:
        for section in self._sections:
            if section.of == binary.variant.head:
                for entry in self._entries(section):
                    if entry.text == str(binary.variant) and entry.binary == binary:
                        return self._checked(section, entry, opened)
        raise KeyError(f"{self.path} does not hold {binary}")

    def _checked(self, section: _Section, entry: Entry, opened: _Chunks) -> bytes:
        (chunk, start), binary = entry.place, entry.binary
        again = "reinstall the package that brought this file"
        places = self._section(section).chunks
        if chunk >= len(places):
            raise ArchiveError(f"{self.path}: {binary} is in chunk {chunk} of {len(places)}")
        try:
            if (section, chunk) not in opened:
                offset, size = places[chunk]
                packed = self._bytes(self.manifest["start"] + offset, size)
                opened[section, chunk] = chunks.Opened(packed)
            content = opened[section, chunk].part(start, binary.size)
        except ValueError as error:
            opened.pop((section, chunk), None)  # what lies before the damage can still be read
            raise ArchiveError(f"{self.path}: {binary}: its chunk {error}; {again}") from error
        found = digest(content)
        if found != binary.sha256:
            cut = "" if len(content) == binary.size else f" ({len(content)} of {binary.size} bytes)"
            raise ArchiveError(
                f"{self.path}: {binary} has SHA-256 {found}{cut}, "
                f"its entry states {binary.sha256}; {again}"
            )
        return content
