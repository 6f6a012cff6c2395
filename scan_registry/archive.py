"""Archives: the binaries of one architecture and what describes them, in one file.

Layout, little-endian:

    offset 0    8 bytes   magic "SCANREG" and the format's number
           8    8         length of the manifest
          16   32         SHA-256 of the manifest
          48   …          the manifest, UTF-8 JSON
           …   …          binaries back to back, each distinct content once
           …   …          sections, UTF-8 JSON: the entries of one kernel in one language each

The manifest gives the offset, size and SHA-256 of each section, and a section's entries give those of
their binaries; offsets count from the end of the manifest. So a first call reads and checks the
entries of its kernel and one binary, however many there are. What all entries of a section have in
common, the section says once. Nothing in a file is believed before its digest is checked: every
defect raises :class:`ArchiveError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from scan_registry.kernels.model import Variant
from scan_registry.target import CudaVersion, Target

MAGIC = b"SCANREG\x02"
SCHEMA = 3
SUFFIX = ".scanreg"
_HEADER = struct.Struct("<8sQ32s")


class ArchiveError(Exception):
    """A file that is not an intact archive; the message names the file and what is wrong."""


@dataclass(frozen=True)
class Binary:
    """A variant compiled for one target.

    format          "cubin" or "ptx"
    format_version  of its ELF ABI ("7") or PTX ISA ("8.8")
    oldest_driver   CUDA version that a driver has to support to load it
    entry           symbol of the entry point
    block           threads per block, along x, y and z
    cluster         blocks per cluster, likewise
    dynamic_shared  bytes of dynamic shared memory to ask for at launch
    hidden          null pointers to append to the parameters (Triton's scratch buffers)
    registers, static_shared, spill_bytes
                    per thread, per block and per thread; None for PTX, where the driver decides
    size, sha256    of the binary's bytes
    compiler        name and version
    options         what the compiler was given, in order
    source_sha256   digest of the sources, whatever their path
    """

    variant: Variant
    target: Target
    format: str
    format_version: str
    oldest_driver: CudaVersion
    entry: str
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    hidden: int
    registers: int | None
    static_shared: int | None
    spill_bytes: int | None
    size: int
    sha256: str
    compiler: str
    options: tuple[str, ...]
    source_sha256: str

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["variant"] = str(self.variant)
        record["target"] = str(self.target)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Binary:
        """The binary a manifest entry describes; ``ValueError`` if it does not describe one."""
        if not isinstance(record, Mapping):
            raise ValueError(f"{record!r} is not an object")
        return cls(**{name: _READERS[name](name, record.get(name)) for name in _NAMES})

    def __str__(self) -> str:
        return f"{self.variant} for {self.target}"

    @property
    def threads(self) -> int:
        """Per block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def shared(self) -> int:
        """Bytes of shared memory per block, static and dynamic."""
        return self.dynamic_shared + (self.static_shared or 0)


def _count(value: object) -> bool:
    """A number of bytes, registers or the like that a file can mean."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not a string")
    return value


def _read_count(name: str, value: Any) -> int:
    if not _count(value):
        raise ValueError(f"{name} is {value!r}, not a count")
    return int(value)


def _read_optional_count(name: str, value: Any) -> int | None:
    return None if value is None else _read_count(name, value)


def _read_extent(name: str, value: Any) -> tuple[int, ...]:
    extent = isinstance(value, list) and len(value) == 3 and all(_count(n) and n for n in value)
    if not extent:
        raise ValueError(f"{name} is {value!r}, not three positive integers")
    return tuple(value)


def _read_version(name: str, value: Any) -> tuple[int, ...]:
    if not (isinstance(value, list) and len(value) == 2 and all(map(_count, value))):
        raise ValueError(f"{name} is {value!r}, not a version of two numbers")
    return tuple(value)


def _read_texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r}, not a list")
    return tuple(map(str, value))


#: How the fields of a binary are read from a manifest; what is not named here is text.
_READERS: Mapping[str, Callable[[str, Any], Any]] = defaultdict(
    lambda: _read_text,
    variant=lambda name, value: Variant.parse(str(value)),
    target=lambda name, value: _target(str(value)),
    oldest_driver=_read_version,
    block=_read_extent,
    cluster=_read_extent,
    dynamic_shared=_read_count,
    hidden=_read_count,
    registers=_read_optional_count,
    static_shared=_read_optional_count,
    spill_bytes=_read_optional_count,
    size=_read_count,
    options=_read_texts,
)
_NAMES = tuple(field.name for field in fields(Binary))
_target: Callable[[str], Target] = lru_cache(Target.parse)


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
) -> None:
    """Write an archive in one step: readers see the old file or the new one, never a part.

    ``provenance`` is the package's version and source commit. Binaries keep their order; equal
    bytes are stored once.
    """
    records, parts, offsets, end = [], [], {}, 0
    for binary, content in binaries:
        if digest(content) != binary.sha256:
            raise ValueError(f"the bytes of {binary.variant} do not have the digest it states")
        if binary.sha256 not in offsets:
            offsets[binary.sha256] = end
            parts.append(content)
            end += len(content)
        records.append({**binary.to_json(), "offset": offsets[binary.sha256]})
    sections = []
    for of, group in groupby(records, lambda record: Variant.parse(record["variant"]).head):
        parts.append(_dumped(_section(list(group))))
        place = {"offset": end, "size": len(parts[-1]), "sha256": digest(parts[-1])}
        sections.append({"of": of, **place})
        end += len(parts[-1])
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


def _section(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries, with what they have in common taken out of them."""
    first, *others = records
    common = {
        name: value
        for name, value in first.items()
        if others and all(record[name] == value for record in others)
    }
    own = [{k: v for k, v in record.items() if k not in common} for record in records]
    return {"common": common, "binaries": own}


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
    def offset(self) -> int:
        """Of the binary's bytes, from the end of the manifest; ``ArchiveError`` likewise."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[Binary, int]:
        _ = self.variant  # an error if it names none
        try:
            return Binary.from_json(self._record), _read_count("offset", self._record.get("offset"))
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
            _read_text("of", record.get("of")),
            _read_count("offset", record.get("offset")),
            _read_count("size", record.get("size")),
            _read_text("sha256", record.get("sha256")),
        )


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
        if section not in self._read_sections:
            self._read_sections[section] = tuple(self._read_section(section))
        return self._read_sections[section]

    @cached_property
    def _read_sections(self) -> dict[_Section, tuple[Entry, ...]]:
        return {}

    def _read_section(self, section: _Section) -> Iterator[Entry]:
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
        for number, own in enumerate(document["binaries"]):
            record = {**common, **own} if isinstance(own, dict) else own
            entry = Entry(record, f"{self.path}: binary {number} of {name}")
            if entry.text.rpartition(":")[0] != section.of:
                raise ArchiveError(f"{self.path}: binary {number} of {name} is {entry.text!r}")
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
        held = self.of(binary.variant.family, binary.variant.kernel)
        alike = (entry for entry in held if entry.text == str(binary.variant))
        entry = next((entry for entry in alike if entry.binary == binary), None)
        if entry is None:
            raise KeyError(f"{self.path} does not hold {binary}")
        content = self._bytes(self.manifest["start"] + entry.offset, binary.size)
        found = digest(content)
        if found != binary.sha256:
            cut = "" if len(content) == binary.size else f" ({len(content)} of {binary.size} bytes)"
            raise ArchiveError(
                f"{self.path}: {binary} has SHA-256 {found}{cut}, "
                f"its entry states {binary.sha256}; reinstall the package that brought this file"
            )
        return content
