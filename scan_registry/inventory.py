"""The catalogue: every archive installed on this machine, and what was measured of its binaries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from scan_registry.archive import SUFFIX, Archive, Binary
from scan_registry.kernels import ROOT


@dataclass(frozen=True)
class Attestation:
    """The measured error of one binary against the float64 reference, on one GPU.

    error and tolerance are ‖out − ref‖ / ‖ref‖, the largest over ``cases`` random problems.
    """

    sha256: str
    variant: str
    target: str
    error: float
    tolerance: float
    cases: int
    gpu: str
    date: str

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


class Catalogue:
    """Archives in the order in which selection considers them; nothing is read before it is used."""

    def __init__(self, archives: tuple[Archive, ...]) -> None:
        self.archives = archives

    def __repr__(self) -> str:
        held = ", ".join(archive.arch.label for archive in self.archives) or "no archives"
        return f"Catalogue({held})"

    def __iter__(self) -> Iterator[tuple[Archive, Binary]]:
        """Every binary, with the archive that holds it."""
        for archive in self.archives:
            for binary in archive.binaries:
                yield archive, binary

    @cached_property
    def attestations(self) -> dict[str, Attestation]:
        """By digest of the binary."""
        return worst_attestations(ROOT)

    def proven(self, binary: Binary) -> bool:
        """Whether a GPU has run this very binary and found it within tolerance."""
        attestation = self.attestations.get(binary.sha256)
        return attestation is not None and attestation.passed


def worst_attestations(kernels: Path) -> dict[str, Attestation]:
    """The attestations in a folder of families, by digest; of several for one binary, the worst."""
    found: dict[str, Attestation] = {}
    for path in sorted(kernels.glob("*/attestations/*.json")):
        for attestation in read_attestations(path):
            known = found.get(attestation.sha256)
            if known is None or not attestation.error <= known.error:
                found[attestation.sha256] = attestation
    return found


def read_attestations(path: Path) -> list[Attestation]:
    """The attestations of one file; see ``tools/attest.py`` for how they come about.

    ``ValueError`` if the file holds none.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        shared = {"gpu": content["gpu"], "date": content["date"]}
        return [Attestation(**shared, **record) for record in content["binaries"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no attestations: {error!r}") from error


@cache
def catalogue() -> Catalogue:
    """What is installed: the archives in this package, by architecture."""
    archives = [Archive(path) for path in (Path(__file__).parent / "archives").glob(f"*{SUFFIX}")]
    return Catalogue(tuple(sorted(archives, key=lambda archive: archive.arch)))
