"""Write the archive of one architecture, with where its binaries come from."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scan_registry.aot.plan import tunings_for
from scan_registry.artifact import archive
from scan_registry.artifact.archive import Binary
from scan_registry.hardware.target import Target
from scan_registry.kernels import families
from scan_registry.kernels.tables import forget_reduced, leave_reduced
from scan_registry.kernels.tuning import Tuning


def provenance(root: Path, version: str) -> dict[str, Any]:
    """Package version and source commit; ``SCAN_REGISTRY_COMMIT`` stands in where there is no git.

    ``dirty`` says whether tracked files differed from that commit; None where nothing can tell.
    """
    commit, dirty = os.environ.get("SCAN_REGISTRY_COMMIT"), None
    if commit is None and (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        if commit:
            dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    return {"version": version, "commit": commit, "dirty": dirty}


def _git(root: Path, *words: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *words],
            cwd=root,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def pack(
    folder: Path,
    arch: Target,
    binaries: Iterable[tuple[Binary, bytes]],
    origin: Mapping[str, Any],
) -> Path:
    """Write ``<folder>/<arch>.scanreg`` and return its path."""
    path = folder / f"{arch.label}{archive.SUFFIX}"
    archive.write(path, arch, binaries, origin, tunings(arch))
    return path


def forget_tunings() -> None:
    """Remove what an earlier build has left for the JIT: the tables may be others now."""
    for family in families().values():
        forget_reduced(family.folder)


def leave_tunings() -> None:
    """Leave what the JIT needs of the tables, so that no first call has to read them."""
    for family in families().values():
        for kernel in family.kernels:
            if kernel.tunable.shape is not None:
                leave_reduced(family.folder, kernel.head, kernel.tunable.tunings())


def tunings(arch: Target) -> dict[str, tuple[Tuning, ...]]:
    """What tuning found that is of use in an archive, by how the kernels' variants begin."""
    kernels = [kernel for family in families().values() for kernel in family.kernels]
    by_kernel = {kernel.head: tunings_for(kernel, arch) for kernel in kernels}
    return {head: tuned for head, tuned in by_kernel.items() if tuned}
