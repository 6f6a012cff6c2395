"""A cache of compiled binaries, turned into a package that other machines install: see ``package``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from packaging.version import InvalidVersion, Version

from scan_registry.aot.pack import tunings
from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive, ArchiveError, Binary
from scan_registry.cache.store import Cache
from scan_registry.catalog.providers import core_range
from scan_registry.diagnostics.verify import origin
from scan_registry.dispatch.candidates import denial
from scan_registry.hardware.target import Target
from scan_registry.kernels import families
from scan_registry.kernels.model import Kernel
from scan_registry.packaging.package import Package

Row = tuple[Archive, Binary]


# --- What a cache holds -----------------------------------------------------------------------


@dataclass(frozen=True)
class Cached:
    """One entry of a cache: its file's size, when it was written, and what it is.

    damage  why it holds no binary; the cache would compile it again
    stale   why the shipped sources no longer give this binary; it is never looked up again
    """

    archive: Archive
    size: int
    modified: float
    binary: Binary | None = None
    damage: str | None = None
    stale: str | None = None

    @property
    def state(self) -> str:
        return "damaged" if self.damage else "stale" if self.stale else "current"


def contents(cache: Cache) -> Iterator[Cached]:
    """Every entry of a cache, each byte checked."""
    for entry in cache.entries():
        try:
            status = entry.path.stat()
        except FileNotFoundError:  # somebody is clearing the cache
            continue
        cached = Cached(entry, status.st_size, status.st_mtime)
        try:
            binary = _only_binary(cache, entry)
        except (ArchiveError, ValueError) as error:
            yield replace(cached, damage=str(error).removeprefix(f"{entry.path}: "))
        else:
            yield replace(cached, binary=binary, stale=origin(binary))


def _only_binary(cache: Cache, entry: Archive) -> Binary:
    key = entry.manifest.get("cache_key")
    if key != entry.path.parent.name:
        raise ValueError(f"its key is {key}, its folder's name is another")
    if len(entry.binaries) != 1:
        raise ValueError(f"{len(entry.binaries)} binaries, not one")
    (binary,) = entry.binaries
    entry.read(binary)
    # The cache is stricter still: it also looks at who could have written the entry.
    if cache.refusal() is None and cache.get(key, entry.arch) is None:
        raise ValueError("the cache does not use it: others can write to its folder")
    return binary


@dataclass(frozen=True)
class Choice:
    """What goes into a package, by target and in the specs' order, and why the rest does not."""

    taken: Mapping[Target, tuple[Row, ...]]
    left_out: tuple[tuple[Cached, str], ...]


def choose(entries: Iterable[Cached], denied: Mapping[str, str]) -> Choice:
    """One binary for each variant and target: of what this version compiles, the newest compiler's."""
    kernels = {k.head: k for family in families().values() for k in family.kernels}
    best: dict[tuple[Target, str], Row] = {}
    left_out = []
    for entry in sorted(entries, key=_newest_first):
        if (reason := _take(entry, best, kernels, denied)) is not None:
            left_out.append((entry, reason))
    # Of these kernels alone: some have variants by the thousand.
    heads = {binary.variant.head for _, binary in best.values()}
    variants = [str(v) for head in kernels if head in heads for v in kernels[head].every]
    taken = {
        target: tuple(best[target, v] for v in variants if (target, v) in best)
        for target in sorted({target for target, _ in best})
    }
    left_out.sort(key=lambda pair: str(pair[0].archive.path))
    return Choice(taken, tuple(left_out))


def _take(
    entry: Cached,
    best: dict[tuple[Target, str], Row],
    kernels: Mapping[str, Kernel],
    denied: Mapping[str, str],
) -> str | None:
    """Add the entry's binary to ``best``; why not, if it is not added."""
    binary = entry.binary
    if binary is None or entry.damage or entry.stale:
        return entry.damage or entry.stale
    variant, kernel = str(binary.variant), kernels.get(binary.variant.head)
    if reason := denied.get(binary.sha256) or denial(denied, kernel, variant):
        return reason
    _, first = best.setdefault((entry.archive.arch, variant), (entry.archive, binary))
    return None if first is binary else f"{first.compiler} has made it, too"


def _newest_first(entry: Cached) -> tuple[tuple[int, ...], str]:
    version = entry.binary.compiler.rpartition(" ")[2] if entry.binary else ""
    try:
        release = Version(version).release
    except InvalidVersion:
        release = ()
    return tuple(-number for number in (*release, 0)), str(entry.archive.path)


# --- The package ------------------------------------------------------------------------------


def exported(label: str, made_with: str, by_target: Mapping[Target, tuple[Row, ...]]) -> Package:
    """The package of binaries that version ``made_with`` of this one has compiled."""
    provenance = {"version": made_with, "commit": None, "dirty": None}
    archives = {}
    with tempfile.TemporaryDirectory() as folder:
        for target, rows in by_target.items():
            path = Path(folder, f"{target.label}{archive.SUFFIX}")
            binaries = [(binary, source.read(binary)) for source, binary in rows]
            archive.write(path, target, binaries, provenance, tunings(target))
            archives[target] = path.read_bytes()
    return Package(label, _version(made_with, by_target), made_with, archives)


def _version(made_with: str, by_target: Mapping[Target, tuple[Row, ...]]) -> str:
    """That of the maker, and a digest of what is held: other binaries, another version."""
    listed = [
        [str(target), binary.to_json()] for target, rows in by_target.items() for _, binary in rows
    ]
    digest = sha256(json.dumps([core_range(made_with), listed]).encode()).hexdigest()
    return f"{Version(made_with).public}+c{digest[:12]}"
