"""What was tuned on this machine: for each GPU one archive in the cache's folder, which holds the
variants that are the fastest there and the rows that say so.

It is found by a key over all that makes it valid: the GPU's name, this package's version, and the kernels' sources
and specs. If any of these differs, the archive is not found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from scan_registry.artifact.archive import Archive, ArchiveError, digest
from scan_registry.base.frozen import dataclass
from scan_registry.cache.store import Cache, Entry, jit_cache, jit_folder
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels import ROOT
from scan_registry.kernels.model import Variant
from scan_registry.kernels.tuning import Tuning
from scan_registry.version import __version__

_FOLDER = "tuned"
_SOURCES = (".cu", ".cuh", ".py")


def tuned_cache() -> Cache:
    """Where the archives lie; a cache of its own, within the JIT's."""
    return Cache(jit_folder() / _FOLDER)


def key_of(gpu: str) -> str:
    """The key of what is tuned on GPUs of this name with the present package."""
    return digest(json.dumps(["tuned", gpu, __version__, _sources()]).encode())


@cache
def archive_of(device: Device) -> Archive | None:
    """What was tuned on such a device, if anything was; looked for once in a process."""
    # Most machines have no such archive, so looking must be quick. A folder that may not be read is no error.
    if not os.path.isdir(jit_folder() / _FOLDER):
        return None
    return tuned_cache().open(key_of(device.name), Target(device.capability))


def publish(
    device: Device, entries: Sequence[Entry], tunings: Mapping[str, Tuning], date: str
) -> Archive:
    """Add binaries and tunings, by how their kernel's variants begin, to what was tuned on such a device
    before. What is known of a problem is replaced; the rest stays. Return the archive.

    ``OSError`` says why the folder cannot be used.
    """
    place = tuned_cache()
    key, target = key_of(device.name), Target(device.capability)
    by_variant: dict[Variant, Entry] = {}
    merged = dict(tunings)
    before = place.open(key, target)
    if before is not None:
        with suppress(ArchiveError, ValueError):  # a damaged one counts as missing
            older = {binary.variant: (binary, before.read(binary)) for binary in before.binaries}
            for head in {variant.head for variant in older}:
                for tuning in before.tunings(head):
                    merged[head] = tuning.with_newer(tunings[head]) if head in tunings else tuning
            by_variant = older
    by_variant |= {binary.variant: (binary, content) for binary, content in entries}
    every = [by_variant[variant] for variant in sorted(by_variant, key=str)]
    one_each = {head: (tuning,) for head, tuning in merged.items()}
    jit_cache().make_folder()  # it lies within
    place.publish(key, target, every, {"gpu": device.name, "date": date}, one_each)
    archive_of.cache_clear()
    published = place.open(key, target)
    assert published is not None
    return published


@cache
def _sources() -> str:
    """Digest of everything in the families' folders that a binary or a launch depends on."""
    paths = [path for path in sorted(ROOT.glob("*/*")) if path.suffix in _SOURCES]
    texts = [[path.relative_to(ROOT).as_posix(), digest(path.read_bytes())] for path in paths]
    return digest(json.dumps(texts).encode())


# --- What there is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalTuning:
    """One file of what was tuned, for people.

    kernels  by how their variants begin
    damage   why it is not used, nor could be
    stale    why it is no longer used
    """

    archive: Archive
    size: int
    gpu: str | None = None
    date: str | None = None
    kernels: tuple[str, ...] = ()
    binaries: int = 0
    damage: str | None = None
    stale: str | None = None

    @property
    def state(self) -> str:
        return "damaged" if self.damage else "stale" if self.stale else "current"


def tuned_contents() -> Iterator[LocalTuning]:
    """Everything that was tuned here, each byte checked."""
    place = tuned_cache()
    for archive in place.entries():
        try:
            local = LocalTuning(archive, archive.path.stat().st_size)
        except FileNotFoundError:  # somebody is clearing the cache
            continue
        try:
            read = archive.reader()
            for binary in archive.binaries:
                read(binary)
            key = archive.manifest.get("cache_key")
            if key != archive.path.parent.name or place.open(key, archive.arch) is None:
                raise ArchiveError("its key is another, or others can write to its folder")
        except ArchiveError as error:
            yield replace(local, damage=str(error).removeprefix(f"{archive.path}: "))
            continue
        gpu = str(archive.manifest.get("gpu"))
        yield replace(
            local,
            gpu=gpu,
            date=str(archive.manifest.get("date")),
            kernels=tuple(dict.fromkeys(binary.variant.head for binary in archive.binaries)),
            binaries=len(archive.binaries),
            stale=None if key == key_of(gpu) else "this version has other kernels or specs",
        )
