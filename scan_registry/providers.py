"""Packages that bring archives, found through the entry-point group ``scan_registry.archives``.

An entry point's value names a package (which is never imported) with a folder ``archives`` and a
manifest ``provider.json``:

    {"schema": 1,
     "core": ">=0.1,<0.2",                  versions of scan-registry that can read the archives
     "denied": [{"sha256": "…", "reason": "…"},       a binary that must not run, whoever brings it
                {"variant": "…", "reason": "…"}]}     a variant that must not, not even compiled here

This package is a provider, too; it need not say which versions of itself it goes with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from scan_registry import distributions
from scan_registry.archive import SUFFIX, Archive, parse_json

GROUP = "scan_registry.archives"
CORE = "scan-registry"
MANIFEST = "provider.json"
SCHEMA = 1


class ProviderError(RuntimeError):
    """A package that brings archives but does not fit this version, or is not intact; the message
    names both versions, or the file."""


@dataclass(frozen=True)
class Provider:
    """An installed package that brings archives.

    core    the range of this package's versions that it is made for
    denied  reasons, by the digest of a binary or by a variant
    """

    name: str
    version: str
    folder: Path
    core: str
    denied: dict[str, str]

    @property
    def archives(self) -> tuple[Archive, ...]:
        """By architecture."""
        found = (Archive(path, self.name) for path in (self.folder / "archives").glob(f"*{SUFFIX}"))
        return tuple(sorted(found, key=lambda archive: archive.arch))

    def mismatch(self, core: str) -> str | None:
        """Why it does not go with version ``core`` of this package, or None if it does."""
        if self.name == CORE:
            return None
        from packaging.specifiers import SpecifierSet

        if SpecifierSet(self.core).contains(core, prereleases=True):
            return None
        return (
            f"{self.name} {self.version} is made for {CORE} {self.core}, but {CORE} {core} is "
            f"installed; `pip install '{CORE}{self.core}'`, or install the {self.name} that goes "
            f"with {core}"
        )


def installed() -> tuple[Provider, ...]:
    """Every provider on this machine, this package first.

    ``ProviderError`` if one is not intact. Whether one fits is for ``Provider.mismatch`` to say.
    """
    providers = [read(*found) for found in _entry_points()]
    return tuple(sorted(providers, key=lambda provider: (provider.name != CORE, provider.name)))


def _entry_points() -> Iterator[tuple[str, str, Path]]:
    """Name and version of each distribution that has the entry point, and the package's folder."""
    for distribution in distributions.mentioning(GROUP):
        name, version = distribution.name, distribution.version
        points = Distribution.at(distribution.folder).entry_points.select(group=GROUP)
        for point in points:
            if not point.value.isidentifier():
                raise ProviderError(
                    f"{name} {version}: its entry point {point.name} = {point.value!r} must name a "
                    "top-level package"
                )
            spec = importlib.util.find_spec(point.value)
            folders = list(spec.submodule_search_locations or ()) if spec else []
            if not folders:
                raise ProviderError(
                    f"{name} {version}: its package {point.value!r} is not installed; "
                    f"reinstall {name}"
                )
            yield name, version, Path(folders[0])


def read(name: str, version: str, folder: Path) -> Provider:
    """The provider in a package's folder; ``ProviderError`` names the file and what is wrong."""
    path = folder / MANIFEST
    try:
        manifest = parse_json(path.read_bytes())
    except OSError as error:
        raise ProviderError(f"{name} {version}: {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ProviderError(f"{name} {version}: {path} is not JSON: {error}") from error
    try:
        return Provider(name, version, folder, *_parse(manifest, own=name == CORE))
    except ValueError as error:
        raise ProviderError(f"{name} {version}: {path}: {error}") from error


def _is_range(text: str) -> bool:
    # Imported where it is needed: in most environments this package is the only provider.
    from packaging.specifiers import SpecifierSet

    try:
        SpecifierSet(text).contains("0.1", prereleases=True)
    except ValueError:  # InvalidSpecifier is one, and so are numbers that are too long
        return False
    return True


def _parse(manifest: Any, *, own: bool) -> tuple[str, dict[str, str]]:
    """The range of core versions, and what is denied; ``ValueError`` says what is wrong. This package
    states no range: it goes with itself."""
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        stated = manifest.get("schema") if isinstance(manifest, dict) else manifest
        raise ValueError(f"schema {stated!r}; this version reads {SCHEMA}")
    core, listed = manifest.get("core", "" if own else None), manifest.get("denied", [])
    if not (isinstance(core, str) and (own or _is_range(core))):
        raise ValueError(f"core is {core!r}, not a range of versions such as >=0.1,<0.2")
    if not isinstance(listed, list):
        raise ValueError(f"denied is {listed!r}, not a list")
    denied = {}
    for entry in listed:
        given = entry if isinstance(entry, dict) else {}
        subject = given.get("sha256") or given.get("variant")
        if not (isinstance(subject, str) and isinstance(given.get("reason"), str)):
            raise ValueError(
                f"denied has {entry!r}, not an object with sha256 or variant, and reason"
            )
        denied[subject] = f"denied: {given['reason']}"
    return core, denied
