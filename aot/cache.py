"""The build cache: binaries by the digest of all that determines them.

Entries are archives of one binary, so they are written in one step and checked when read, as any
archive. A bad entry counts as missing and is written again.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from scan_registry import archive
from scan_registry.archive import Archive, ArchiveError, Binary
from scan_registry.target import Target


def default_folder() -> Path:
    """``SCAN_REGISTRY_BUILD_CACHE``, else a folder in the user's cache."""
    chosen = os.environ.get("SCAN_REGISTRY_BUILD_CACHE")
    return Path(chosen or platformdirs.user_cache_path("scan-registry") / "build")


class BuildCache:
    """Compiled binaries on disk, by cache key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, key: str, target: Target) -> Path:
        return self.folder / key[:2] / key / f"{target.label}{archive.SUFFIX}"

    def get(self, key: str, target: Target) -> tuple[Binary, bytes] | None:
        """The entry, or None where there is none or it is damaged."""
        found = Archive(self._path(key, target))
        try:
            (binary,) = found.binaries
            return binary, found.read(binary)
        except (ArchiveError, ValueError):
            return None

    def put(self, key: str, target: Target, binary: Binary, content: bytes) -> None:
        """Publish an entry."""
        archive.write(self._path(key, target), target, [(binary, content)], {"cache_key": key})
