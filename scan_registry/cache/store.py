"""Folders of compiled binaries, by the digest of all that determines them.

Wheel builds and the JIT each have one. An entry is an archive of one binary: it is written in one
step and checked when it is read, as any archive. A bad entry counts as missing and is written again.

    <folder>/<ke>/<key>/<arch>.scanreg    the entries
    <folder>/locks/<ke>                   taken while one of the keys is compiled; never deleted
    <folder>/tuned/…                      a cache of its own: see ``tuned``

Correctness rests on the atomic rename and the digests alone. The locks only keep processes from
doing the same work side by side, so where a file system has none, or a holder hangs, nobody waits
for ever. A folder that cannot be used costs one warning, and its binaries stay in memory.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive, ArchiveError, Binary
from scan_registry.hardware.target import Target
from scan_registry.kernels.tuning import Tuning

Entry = tuple[Binary, bytes]

_LOCKS = "locks"
_KEY = r"[0-9a-f]{64}"
_PATIENCE = 120.0  # seconds for somebody else's compile, before this process compiles too


class CacheWarning(UserWarning):
    """A cache folder that cannot be used; what it would have kept is compiled anew by each process."""


def jit_folder() -> Path:
    """``SCAN_REGISTRY_CACHE``, else a folder in the user's cache."""
    return _chosen("SCAN_REGISTRY_CACHE", "jit")


def build_folder() -> Path:
    """``SCAN_REGISTRY_BUILD_CACHE``, else a folder in the user's cache."""
    return _chosen("SCAN_REGISTRY_BUILD_CACHE", "build")


def _chosen(variable: str, name: str) -> Path:
    chosen = os.environ.get(variable)
    if chosen:
        return _placed(chosen)
    # By the XDG base directory specification. The library for it takes longer to import than a first call should
    # take, and every first call looks for what was tuned here.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base, "scan-registry", name)


def _placed(chosen: str) -> Path:
    """The path from the root. One that cannot be known, for want of a home or of a current folder, stays
    relative, which caches refuse."""
    if chosen.startswith("~"):
        return Path(os.path.expanduser(chosen))
    try:
        return Path(chosen).absolute()
    except FileNotFoundError:
        return Path(chosen)


class Cache:
    """Compiled binaries on disk, by cache key; in memory where the disk refuses.

    ``variable`` is the one in the environment that chooses the folder, for what users are told.
    """

    def __init__(self, folder: Path, variable: str = "SCAN_REGISTRY_CACHE") -> None:
        self.folder = folder
        self.variable = variable
        self._memory: dict[tuple[str, Target], Entry] = {}
        self._warned = False

    def obtain(self, key: str, target: Target, make: Callable[[], Entry]) -> Entry:
        """The entry, made and kept if there is none. One process per key makes it at a time."""
        entry = self.get(key, target)
        if entry is None:
            with self._turn(key):
                entry = self.get(key, target)
                if entry is None:
                    entry = make()
                    self.put(key, target, entry)
        return entry

    def get(self, key: str, target: Target) -> Entry | None:
        """The entry, or None where there is none or it is damaged."""
        if (key, target) in self._memory:
            return self._memory[key, target]
        archive = self.open(key, target)
        try:
            if archive is None:
                return None
            (binary,) = archive.binaries
            return binary, archive.read(binary)
        except (ArchiveError, ValueError):
            return None

    def open(self, key: str, target: Target) -> Archive | None:
        """The file of an entry, of which no more than the manifest is checked yet; None where there is
        none, it is of another key, or others can write to its folder."""
        if self._refusal_of(key) is not None:
            return None
        archive = Archive(self._path(key, target), provider=str(self.folder))
        try:
            return archive if archive.manifest.get("cache_key") == key else None
        except ArchiveError:
            return None

    def put(self, key: str, target: Target, entry: Entry) -> None:
        """Publish an entry, or keep it in memory with a warning."""
        try:
            self.publish(key, target, [entry])
        except OSError as error:
            self._memory[key, target] = entry
            where = f": {error.filename}" if error.filename else ""
            self._warn(f"{error.strerror}{where}" if error.strerror else str(error))

    def publish(
        self,
        key: str,
        target: Target,
        entries: Sequence[Entry],
        provenance: Mapping[str, Any] | None = None,
        tunings: Mapping[str, Sequence[Tuning]] | None = None,
    ) -> None:
        """Write a file of one binary or more, in one step, over one that is there; ``OSError`` if the
        folder cannot be used."""
        what = [*entries], {**(provenance or {}), "cache_key": key}, tunings
        try:
            self._publish(key, target, *what)
        except FileNotFoundError:  # somebody is clearing the cache
            self._publish(key, target, *what)

    def _publish(
        self,
        key: str,
        target: Target,
        entries: Sequence[Entry],
        provenance: Mapping[str, Any],
        tunings: Mapping[str, Sequence[Tuning]] | None,
    ) -> None:
        self.make_folder()
        if (reason := self._refusal_of(key)) is not None:
            raise OSError(reason)
        path = self._path(key, target)
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        archive.write(path, target, entries, provenance, tunings)

    def entries(self) -> Iterator[Archive]:
        """Every entry, intact or not."""
        for path in self._files():
            if path.name.endswith(archive.SUFFIX):
                yield Archive(path, provider=str(self.folder))

    def clear(self) -> int:
        """Delete every entry, and what killed processes have left behind; return how many entries.

        Locks stay: another process may be holding one. So does whatever else is in the folder.
        """
        count = 0
        for path in self._files():
            with suppress(FileNotFoundError):
                path.unlink()
                count += path.name.endswith(archive.SUFFIX)
        for folder in self._key_folders():
            for emptied in (folder, folder.parent):
                with suppress(OSError):  # not empty: somebody has just put something there
                    emptied.rmdir()
        return count

    def _key_folders(self) -> list[Path]:
        return [
            inner
            for outer in _children(self.folder)
            for inner in _children(outer)
            if re.fullmatch(_KEY, inner.name) and inner.name[:2] == outer.name
        ]

    def _files(self) -> list[Path]:
        """Entries, and what killed processes have left of them; nothing else that may be there."""
        return [
            file
            for folder in self._key_folders()
            for file in _children(folder)
            if archive.SUFFIX in file.name
        ]

    def refusal(self) -> str | None:
        """Why the folder as it is must not be used, or None: who can write to it can run code."""
        return _refusal(self.folder)

    def _refusal_of(self, key: str) -> str | None:
        """The same for the folder and those within it that lead to an entry: they may have been open
        to others once."""
        for folder in (self.folder, self.folder / key[:2], self.folder / key[:2] / key):
            if (reason := _refusal(folder)) is not None:
                return reason if folder == self.folder else f"{folder}: {reason}"
        return None

    def _path(self, key: str, target: Target) -> Path:
        return self.folder / key[:2] / key / f"{target.label}{archive.SUFFIX}"

    def make_folder(self) -> None:
        """Make the folder, for this user alone; ``OSError`` if it cannot be made or is refused."""
        if self.folder.is_absolute() and not self.folder.exists():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
        if (reason := self.refusal()) is not None:
            raise OSError(reason)

    @contextmanager
    def _turn(self, key: str) -> Iterator[None]:
        """Hold the key's lock, unless the file system has none or its holder takes too long."""
        handle = None
        try:
            self.make_folder()
            locks = self.folder / _LOCKS
            locks.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(locks / key[:2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _take(handle)
        except OSError:
            pass  # putting the entry will say what is wrong, if it matters
        try:
            yield
        finally:
            if handle is not None:
                # By hand: closing would not release it if a fork has copied the handle meanwhile.
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def _warn(self, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the cache folder {self.folder} cannot be used: {reason}. What is compiled stays in "
            f"this process's memory; set {self.variable} to a folder that only you can write to",
            CacheWarning,
            stacklevel=2,
        )


def _take(handle: int) -> None:
    """Lock the file, waiting as long as a compile may take; ``OSError`` where there are no locks."""
    deadline, pause = time.monotonic() + _PATIENCE, 0.001
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def _children(folder: Path) -> list[Path]:
    """The folder's entries in order; none if the folder does not exist, or its path is not known."""
    if not folder.is_absolute():
        return []
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _refusal(folder: Path) -> str | None:
    return _unplaced(folder) or _unsafe(folder)


def _unplaced(folder: Path) -> str | None:
    """Why the folder's path is not known: see ``_placed``."""
    if folder.is_absolute():
        return None
    first = folder.parts[0] if folder.parts else ""
    if first.startswith("~"):
        return f"there is no home folder that {first} could stand for"
    return "the folder that it is relative to is not there"


def _unsafe(folder: Path) -> str | None:
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{error.strerror}: {folder}"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user ({status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        return f"others can write to it (mode {mode:04o}); `chmod go-w` would make it safe"
    return None


_caches: dict[Path, Cache] = {}
_lock = threading.Lock()


def jit_cache() -> Cache:
    """The cache of the JIT; one object per folder, so that each warns once."""
    folder = jit_folder()
    with _lock:
        return _caches.setdefault(folder, Cache(folder))
