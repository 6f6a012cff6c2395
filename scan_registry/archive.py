"""Archives: the binaries of one architecture and their manifest, in one file.

Layout, little-endian:

    offset 0    8 bytes   magic "SCANREG" and the format's number
           8    8         length of the manifest
          16   32         SHA-256 of the manifest
          48   …          the manifest, UTF-8 JSON
           …   …          binaries back to back, each distinct content once

The manifest gives, for each binary, the offset (from the end of the manifest), size and SHA-256 of
its bytes, so that one binary is read and checked without touching the others. Nothing in a file is
believed before its digest is checked: every defect raises :class:`ArchiveError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from scan_registry.kernels.model import Variant
from scan_registry.target import CudaVersion, Target

MAGIC = b"SCANREG\x01"
SCHEMA = 2
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
    target=lambda name, value: Target.parse(str(value)),
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
    records, blobs, offsets, end = [], [], {}, 0
    for binary, content in binaries:
        if digest(content) != binary.sha256:
            raise ValueError(f"the bytes of {binary.variant} do not have the digest it states")
        if binary.sha256 not in offsets:
            offsets[binary.sha256] = end
            blobs.append(content)
            end += len(content)
        records.append({**binary.to_json(), "offset": offsets[binary.sha256]})
    manifest = json.dumps(
        {"schema": SCHEMA, "arch": str(arch), **provenance, "binaries": records},
        separators=(",", ":"),
        sort_keys=True,
    ).encode()
    header = _HEADER.pack(MAGIC, len(manifest), hashlib.sha256(manifest).digest())
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header + manifest)
            file.writelines(blobs)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


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
        try:
            with self.path.open("rb") as file:
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    raise ArchiveError(f"{self.path}: {len(header)} bytes are no archive")
                magic, length, expected = _HEADER.unpack(header)
                if magic != MAGIC:
                    raise ArchiveError(
                        f"{self.path}: starts with {magic!r}; this version reads {MAGIC!r}"
                    )
                content = file.read(min(length, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise ArchiveError(f"{self.path}: {error.strerror or error}") from error
        if hashlib.sha256(content).digest() != expected:
            raise ArchiveError(
                f"{self.path}: the manifest's SHA-256 is {digest(content)}, "
                f"the header states {expected.hex()}"
            )
        try:
            manifest = parse_json(content)
        except (ValueError, RecursionError) as error:
            raise ArchiveError(f"{self.path}: the manifest is not JSON: {error}") from error
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
        """What the archive holds, in the spec's order."""
        return tuple(self._parse(number)[0] for number in range(len(self._records)))

    def of(self, family: str, kernel: str) -> tuple[Binary, ...]:
        """Those that are variants of one kernel. Only their entries of the manifest are parsed: a
        first call has no time for the others."""
        return tuple(self._parse(number)[0] for number in self._kernels.get((family, kernel), ()))

    @cached_property
    def _records(self) -> list[Any]:
        records = self.manifest.get("binaries")
        if not isinstance(records, list):
            raise ArchiveError(f"{self.path}: the manifest lists no binaries")
        return records

    @cached_property
    def _kernels(self) -> dict[tuple[str, str], list[int]]:
        """Numbers of the entries by family and kernel; of those that say neither, none."""
        numbers: dict[tuple[str, str], list[int]] = {}
        for number, record in enumerate(self._records):
            variant = record.get("variant") if isinstance(record, dict) else None
            family, dot, rest = str(variant).partition(".")
            if dot:
                numbers.setdefault((family, rest.partition(":")[0]), []).append(number)
        return numbers

    @cached_property
    def _parsed(self) -> dict[int, tuple[Binary, int]]:
        return {}

    def _parse(self, number: int) -> tuple[Binary, int]:
        """An entry of the manifest: the binary it describes, and the offset of its bytes."""
        if number not in self._parsed:
            record = self._records[number]
            try:
                if not isinstance(record, dict):
                    raise ValueError(f"{record!r} is not an object")
                if not _count(record.get("offset")):
                    raise ValueError(f"offset is {record.get('offset')!r}, not a count of bytes")
                self._parsed[number] = Binary.from_json(record), int(record["offset"])
            except (ValueError, RecursionError) as error:
                raise ArchiveError(
                    f"{self.path}: binary {number} of the manifest: {error}"
                ) from error
        return self._parsed[number]

    def _offset(self, binary: Binary) -> int:
        for known, offset in self._parsed.values():
            if known == binary:
                return offset
        for number in range(len(self._records)):
            known, offset = self._parse(number)
            if known == binary:
                return offset
        raise KeyError(f"{self.path} does not hold {binary}")

    def read(self, binary: Binary) -> bytes:
        """The bytes of ``binary``, checked against its digest."""
        start = self.manifest["start"] + self._offset(binary)
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                content = file.read(min(binary.size, os.fstat(file.fileno()).st_size))
        except (OSError, OverflowError, ValueError) as error:
            raise ArchiveError(f"{self.path}: {error}") from error
        found = digest(content)
        if found != binary.sha256:
            cut = "" if len(content) == binary.size else f" ({len(content)} of {binary.size} bytes)"
            raise ArchiveError(
                f"{self.path}: {binary} has SHA-256 {found}{cut}, "
                f"the manifest states {binary.sha256}; reinstall the package that brought this file"
            )
        return content
