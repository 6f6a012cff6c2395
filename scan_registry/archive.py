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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from scan_registry.kernels.model import Variant
from scan_registry.target import Target

MAGIC = b"SCANREG\x01"
SCHEMA = 1
SUFFIX = ".scanreg"
_HEADER = struct.Struct("<8sQ32s")


class ArchiveError(Exception):
    """A file that is not an intact archive; the message names the file and what is wrong."""


@dataclass(frozen=True)
class Binary:
    """A variant compiled for one target.

    format          "cubin" or "ptx"
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
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = record.get(field.name)
            if field.name == "variant":
                value = Variant.parse(str(value))
            elif field.name == "target":
                value = Target.parse(str(value))
            elif field.name in ("block", "cluster"):
                if not (isinstance(value, list) and len(value) == 3 and all(map(_natural, value))):
                    raise ValueError(f"{field.name} is {value!r}, not three positive integers")
                value = tuple(value)
            elif field.name == "options":
                if not isinstance(value, list):
                    raise ValueError(f"options is {value!r}, not a list")
                value = tuple(map(str, value))
            elif field.name in ("registers", "static_shared", "spill_bytes"):
                if value is not None and not _count(value):
                    raise ValueError(f"{field.name} is {value!r}, not a count or null")
            elif field.name in ("dynamic_shared", "hidden", "size"):
                if not _count(value):
                    raise ValueError(f"{field.name} is {value!r}, not a count")
            elif not isinstance(value, str):
                raise ValueError(f"{field.name} is {value!r}, not a string")
            values[field.name] = value
        return cls(**values)


def _count(value: object) -> bool:
    """A number of bytes, registers or the like that a file can mean."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _natural(value: object) -> bool:
    return _count(value) and value != 0


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
    """A file of binaries, opened lazily: constructing one reads nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
            manifest = json.loads(content)
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
        return tuple(self._offsets)

    @cached_property
    def _offsets(self) -> dict[Binary, int]:
        offsets = {}
        records = self.manifest.get("binaries")
        if not isinstance(records, list):
            raise ArchiveError(f"{self.path}: the manifest lists no binaries")
        for number, record in enumerate(records):
            try:
                if not isinstance(record, dict):
                    raise ValueError(f"{record!r} is not an object")
                if not _count(record.get("offset")):
                    raise ValueError(f"offset is {record.get('offset')!r}, not a count of bytes")
                offsets[Binary.from_json(record)] = int(record["offset"])
            except (ValueError, RecursionError) as error:
                raise ArchiveError(
                    f"{self.path}: binary {number} of the manifest: {error}"
                ) from error
        return offsets

    def read(self, binary: Binary) -> bytes:
        """The bytes of ``binary``, checked against its digest."""
        start = self.manifest["start"] + self._offsets[binary]
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
                f"{self.path}: {binary.variant} for {binary.target} has SHA-256 {found}{cut}, "
                f"the manifest states {binary.sha256}; reinstall the package that brought this file"
            )
        return content
