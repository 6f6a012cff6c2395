"""The catalogue: every archive of every provider on this machine, and what was measured of its
binaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from scan_registry.artifact.archive import Archive, Binary, parse_json
from scan_registry.base.frozen import dataclass
from scan_registry.catalog import providers
from scan_registry.catalog.providers import MISNAMED, Provider, ProviderError
from scan_registry.kernels import ROOT
from scan_registry.version import __version__


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

    def __init__(self, archives: tuple[Archive, ...], providers: tuple[Provider, ...] = ()) -> None:
        self.archives = archives
        self.providers = providers

    def __repr__(self) -> str:
        labels = ", ".join(archive.arch.label for archive in self.archives) or "no archives"
        return f"Catalogue({labels})"

    def __iter__(self) -> Iterator[tuple[Archive, Binary]]:
        """Every binary, with the archive that holds it."""
        for archive in self.archives:
            for binary in archive.binaries:
                yield archive, binary

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """Files in the folders of archives that are not archives, each with the reason."""
        return tuple(f"{path} {MISNAMED}" for p in self.providers for path in p.misnamed)

    @cached_property
    def denied(self) -> dict[str, str]:
        """Reasons why a binary, by its digest, or a variant must not run: any provider's word counts."""
        return {
            subject: f"{reason} ({provider.name} {provider.version})"
            for provider in self.providers
            for subject, reason in provider.denied.items()
        }

    @cached_property
    def attestations(self) -> dict[str, Attestation]:
        """By digest of the binary."""
        return worst_attestations(ROOT)

    def is_gpu_tested(self, binary: Binary) -> bool:
        """Whether a GPU has run this very binary and found it within tolerance."""
        attestation = self.attestations.get(binary.sha256)
        return attestation is not None and attestation.passed


def worst_attestations(kernels: Path) -> dict[str, Attestation]:
    """The attestations in a folder of families, by digest; of several for one binary, the worst."""
    worst: dict[str, Attestation] = {}
    for path in sorted(kernels.glob("*/attestations/*.json")):
        for attestation in read_attestations(path):
            known = worst.get(attestation.sha256)
            if known is None or not attestation.error <= known.error:
                worst[attestation.sha256] = attestation
    return worst


def read_attestations(path: Path) -> list[Attestation]:
    """The attestations of one file; see ``tools/attest.py`` for how they come about.

    ``ValueError`` if the file holds none.
    """
    try:
        content: dict[str, Any] = parse_json(path.read_bytes())
        shared = {"gpu": content["gpu"], "date": content["date"]}
        return [_checked(Attestation(**shared, **record)) for record in content["binaries"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} holds no attestations: {error!r}") from error


def _checked(attestation: Attestation) -> Attestation:
    """``ValueError`` if a field is of another type than it is declared."""
    for field in fields(Attestation):
        value = getattr(attestation, field.name)
        accepted: tuple[type, ...] = {"str": (str,), "int": (int,)}.get(
            str(field.type), (int, float)
        )
        if not isinstance(value, accepted) or isinstance(value, bool):
            raise ValueError(f"{field.name} is {value!r}, not a {field.type}")
    return attestation


@cache
def catalogue() -> Catalogue:
    """What is installed, by architecture; of equals, this package's own come first.

    ``ProviderError`` if a provider is not intact, or is not made for this version, naming both.
    """
    surveyed, problems = survey()
    if problems:
        raise problems[0]
    return surveyed


def survey() -> tuple[Catalogue, tuple[ProviderError, ...]]:
    """The catalogue of the providers that are intact and made for this version, and what is wrong
    with the others."""
    installed, errors = providers.installed()
    problems, fitting = list(errors), []
    for provider in installed:
        if reason := provider.mismatch(__version__):
            problems.append(ProviderError(reason))
        else:
            fitting.append(provider)
    archives = [archive for provider in fitting for archive in provider.archives]
    ordered = sorted(archives, key=lambda archive: archive.arch)
    return Catalogue(tuple(ordered), tuple(fitting)), tuple(problems)
