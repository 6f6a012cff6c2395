"""Archives: the binaries of one architecture and what describes them, in one file.

Layout, little-endian:

    offset 0    8 bytes   magic "SCANREG" and the format's number
           8    8         length of the manifest
          16   32         SHA-256 of the manifest
          48   …          the manifest, UTF-8 JSON
           …   …          chunks: binaries of one family in one language, compressed together (raw LZMA2)
           …   …          sections, lines of UTF-8 JSON: entries of one kernel in one language and dtype each
           …   …          tunings, UTF-8 JSON: what tuning found of one kernel in one language each

The manifest lists sections and tunings, each as ``<of>: <offset> <size> <SHA-256>``, where the variants that
it is of begin with ``<of>``. A section lists the chunks of its family and language, and an entry the chunk
its binary is in, where it starts once that is decompressed, its size and SHA-256. Offsets in the file count from the end of
the manifest. So a first call reads and checks the entries of its kernel and dtype and decompresses one
chunk as far as its binary, however many there are. Binaries of one family are much alike, which is why
they share a chunk; a chunk is small, which is what bounds the time to get at its last binary. Nothing in a
file is believed before its digest is checked: every defect raises :class:`ArchiveError`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from scan_registry.artifact import chunks
from scan_registry.artifact.binary import Binary
from scan_registry.artifact.sections import (
    ArchiveError,
    Content,
    Document,
    Entry,
    digest,
    dumped,
    parse_json,
    read_tunings,
    section_text,
)
from scan_registry.hardware.target import Target
from scan_registry.kernels.tuning import Tuning

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

MAGIC = b"SCANREG\x05"
SCHEMA = 6
SUFFIX = ".scanreg"
_HEADER = struct.Struct("<8sQ32s")


def write(
    path: Path,
    arch: Target,
    binaries: Iterable[tuple[Binary, bytes]],
    provenance: Mapping[str, Any],
    tunings: Mapping[str, Sequence[Tuning]] | None = None,
) -> None:
    """Write an archive in one step: readers see the old file or the new one, never a part.

    ``provenance`` is the package's version and source commit. Binaries keep their order; equal bytes are stored once.
    The keys of ``tunings`` are the beginnings of variants' names, which say the kernel and language; tunings of
    kernels without binaries are left out.
    """
    parts: list[bytes] = []
    end = 0

    def place(part: bytes) -> tuple[int, int]:
        """Its offset and size."""
        nonlocal end
        parts.append(part)
        end += len(part)
        return end - len(part), len(part)

    sections, tuned = list[tuple[str, bytes]](), list[tuple[str, bytes]]()
    pairs, own = list(binaries), tunings or {}
    chunked = dict[str, tuple[Mapping[str, Place], list[tuple[int, int]]]]()
    for kin, group in _grouped(pairs, _kin):
        located, packed = _in_chunks(group, own, arch)
        chunked[kin] = located, [place(chunk) for chunk in packed]
    for head, group in _grouped(pairs, lambda pair: pair[0].variant.head):
        inside, places = chunked[_kin(group[0])]
        for stem, alike in _grouped(group, lambda pair: pair[0].variant.stem):
            records = [{**binary.to_json(), **inside[binary.sha256]} for binary, _ in alike]
            sections.append((stem, section_text(records, places)))
        if own.get(head):
            tuned.append((head, dumped([asdict(tuning) for tuning in own[head]])))
    listed = dict[str, list[str]]()
    for name, texts in (("sections", sections), ("tunings", tuned)):
        listed[name] = [str(Document(of, *place(text), digest(text))) for of, text in texts]
    manifest = dumped({"schema": SCHEMA, "arch": str(arch), **provenance, **listed})
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


#: The number of the chunk that a binary is in, and the offset there, by these names.
Place = Mapping[str, int]
Item = TypeVar("Item")
Said = TypeVar("Said")


def _grouped(
    listed: Iterable[Item], key: Callable[[Item], str]
) -> Iterable[tuple[str, Sequence[Item]]]:
    """The items grouped by key, in order of first appearance."""
    groups: dict[str, list[Item]] = {}
    for item in listed:
        groups.setdefault(key(item), []).append(item)
    return groups.items()


def _kin(pair: tuple[Binary, bytes]) -> str:
    """The key of binaries that may share a chunk: family and language. Their kernels have much code in common."""
    return f"{pair[0].variant.family}:{pair[0].variant.language}"


def _in_chunks(
    pairs: Sequence[tuple[Binary, bytes]], tunings: Mapping[str, Sequence[Tuning]], arch: Target
) -> tuple[dict[str, Place], list[bytes]]:
    """Where binaries lie, by their digests, and the chunks; equal bytes are once. What is the fastest
    somewhere on GPUs of this very architecture is in small chunks. In a chunk, whose end takes longest to read,
    first come those that tuning found to be the fastest most often; of kernels without tuning all are in order."""
    distinct = {binary.sha256: (binary, content) for binary, content in reversed(pairs)}
    for binary, content in distinct.values():
        if digest(content) != binary.sha256:
            raise ValueError(f"the bytes of {binary.variant} do not have the digest it states")
    wins, here = _wins({binary.variant.head for binary, _ in pairs}, tunings, arch)
    first, others = list[tuple[Binary, bytes]](), list[tuple[Binary, bytes]]()
    for binary, content in reversed(distinct.values()):
        (first if here[str(binary.variant)] else others).append((binary, content))
    together = (*_alike(first, chunks.SMALL), *_alike(others, chunks.SIZE))
    places = dict[str, Place]()
    for number, parts in enumerate(together):
        parts.sort(key=lambda pair: -wins[str(pair[0].variant)] if wins else pairs.index(pair))
        ends = accumulate((len(content) for _, content in parts), initial=0)
        for (binary, _), offset in zip(parts, ends, strict=False):
            places[binary.sha256] = {"chunk": number, "offset": offset}
    return places, _compressed([b"".join(content for _, content in parts) for parts in together])


def _compressed(contents: Sequence[bytes]) -> list[bytes]:
    """Their chunks, as many at a time as there are cores."""
    if len(contents) < 2:
        return [*map(chunks.compress, contents)]
    from concurrent.futures import ThreadPoolExecutor  # which nothing that reads archives imports

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [*pool.map(chunks.compress, contents)]


def _wins(
    heads: Iterable[str], tunings: Mapping[str, Sequence[Tuning]], arch: Target
) -> tuple[Counter[str], Counter[str]]:
    """How often tuning found each variant to be the fastest: on all GPUs, and on those of the architecture."""
    wins, here = Counter[str](), Counter[str]()
    for head in heads:
        for tuning in tunings.get(head, ()):
            if not tuning.exclusive:
                won = Counter({f"{head}:{label}": n for label, n in tuning.wins().items()})
                wins += won
                here += won if tuning.arch == str(arch) else Counter()
    return wins, here


def _alike(
    binaries: Sequence[tuple[Binary, bytes]], most: int
) -> Iterator[list[tuple[Binary, bytes]]]:
    """Groups of binaries with the same static parameters and similar sizes, which are the most alike. A group has at
    most the given bytes, unless one binary is larger."""

    def likeness(pair: tuple[Binary, bytes]) -> tuple[list[str], int]:
        binary, content = pair
        return [name for name, _ in binary.variant.statics], len(content)

    together, space = list[tuple[Binary, bytes]](), most
    for pair in sorted(binaries, key=likeness):
        if together and space < len(pair[1]):
            yield together
            together, space = [], most
        together.append(pair)
        space -= len(pair[1])
    if together:
        yield together


#: Chunks that are being read, by offset and size.
_Chunks = dict[tuple[int, int], chunks.Opened]


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
        """What the archive holds, by kernel, language and dtype; ``ArchiveError`` if any entry is not right."""
        sections = self._documents("sections", "")
        return tuple(entry.binary for part in sections for entry in self._section(part).entries)

    def of(
        self, family: str, kernel: str, language: str | None = None, dtype: str | None = None
    ) -> tuple[Entry, ...]:
        """The entries of one kernel's variants, of all languages and dtypes unless one is given; the others
        remain unread."""
        prefix = f"{family}.{kernel}:{language}:" if language else f"{family}.{kernel}:"
        return tuple(
            entry
            for section in self._documents("sections", prefix)
            if dtype in (None, section.dtype or dtype)
            for entry in self._section(section).entries
        )

    def tunings(self, head: str) -> tuple[Tuning, ...]:
        """What tuning found of a kernel in a language; ``head`` is the beginning of its variants' names."""
        listed = self._documents("tunings", f"{head}:")
        said = (self._said("tunings of", document, read_tunings) for document in listed)
        return tuple(tuning for tunings in said for tuning in tunings)

    def _documents(self, name: str, prefix: str) -> tuple[Document, ...]:
        """Those that the manifest lists under a name and that are of what begins with ``prefix``, which ends
        in a colon where that has to end, too; others remain unread."""
        listed = self.manifest.get(name)
        if not isinstance(listed, list):
            raise ArchiveError(f"{self.path}: the manifest lists no {name}")
        try:
            return tuple(Document.read(text) for text in listed if text.startswith(prefix))
        except (AttributeError, ValueError) as error:
            raise ArchiveError(f"{self.path}: the manifest's {name}: {error}") from error

    def _section(self, listed: Document) -> Content:
        return self._said("section", listed, Content.read)

    def _said(self, what: str, listed: Document, read: Callable[[str, bytes, Path], Said]) -> Said:
        """The content of a document, whose bytes are checked against its digest."""
        if (what, listed) not in self._known:
            content = self._bytes(self.manifest["start"] + listed.offset, listed.size)
            if digest(content) != listed.sha256:
                raise ArchiveError(
                    f"{self.path}: the {what} {listed.of} has SHA-256 {digest(content)}, "
                    f"the manifest states {listed.sha256}"
                )
            self._known[what, listed] = read(listed.of, content, self.path)
        said: Said = self._known[what, listed]
        return said

    @cached_property
    def _known(self) -> dict[tuple[str, Document], Any]:
        """What documents say that have been read."""
        return {}

    def _bytes(self, start: int, size: int) -> bytes:
        """A part of the file: less than ``size`` bytes if it ends before."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(handle, min(size, os.fstat(handle).st_size), start)
            finally:
                os.close(handle)
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
        text, stem = str(binary.variant), binary.variant.stem
        for section in self._documents("sections", f"{stem}:"):
            for entry in self._section(section).entries:
                if entry.text == text and entry.binary == binary:
                    return self._unpacked(section, entry, opened)
        raise KeyError(f"{self.path} does not hold {binary}")

    def _unpacked(self, section: Document, entry: Entry, opened: _Chunks) -> bytes:
        (chunk, start), binary = entry.place, entry.binary
        again = "reinstall the package that brought this file"
        places = self._section(section).chunks
        if chunk >= len(places):
            raise ArchiveError(f"{self.path}: {binary} is in chunk {chunk} of {len(places)}")
        place = offset, size = places[chunk]
        try:
            if place not in opened:
                packed = self._bytes(self.manifest["start"] + offset, size)
                opened[place] = chunks.Opened(packed)
            content = opened[place].part(start, binary.size)
        except ValueError as error:
            opened.pop(place, None)  # binaries before the damage can still be read
            raise ArchiveError(f"{self.path}: {binary}: its chunk {error}; {again}") from error
        actual = digest(content)
        if actual != binary.sha256:
            cut = "" if len(content) == binary.size else f" ({len(content)} of {binary.size} bytes)"
            raise ArchiveError(
                f"{self.path}: {binary} has SHA-256 {actual}{cut}, "
                f"its entry states {binary.sha256}; {again}"
            )
        return content
