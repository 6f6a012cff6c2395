"""Packages that bring archives, found through the entry-point group ``scan_registry.archives``.

An entry point's value names a package (which is never imported) with a folder ``archives`` and a
manifest ``provider.json``:

    {"schema": 1,
     "core": ">=0.1,<0.2",                  versions of scan-registry that can read the archives
     "denied": [{"sha256": "…", "reason": "…"},       a binary that must not run, whoever brings it
                {"variant": "…", "reason": "…"}]}     a variant that must not, not even compiled here

A variant that is named without what the problem decides, such as a scan's ``reverse``, stands for all that
differ in that alone. This package is a provider, too; it need not say which versions of itself it goes with.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from scan_registry.artifact.archive import SUFFIX, Archive, ArchiveError, parse_json
from scan_registry.base.frozen import dataclass
from scan_registry.catalog import distributions
from scan_registry.catalog.distributions import Distribution as Installed
from scan_registry.kernels.model import Variant
from scan_registry.version import __version__

GROUP = "scan_registry.archives"
CORE = "scan-registry"
MANIFEST = "provider.json"
SCHEMA = 1
MISNAMED = f"is not used: it is named after no architecture, as sm90{SUFFIX} is"
_SHA256 = r"[0-9a-f]{64}"


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
        """By architecture; unread."""
        return tuple(sorted(filter(_is_named, self._files), key=lambda archive: archive.arch))

    @property
    def misnamed(self) -> tuple[Path, ...]:
        """Files among the archives that are named after no architecture, and not used."""
        return tuple(sorted(archive.path for archive in self._files if not _is_named(archive)))

    @cached_property
    def _files(self) -> tuple[Archive, ...]:
        """The files that were in the folder when it was first read."""
        folder = self.folder / "archives"
        try:
            names = os.listdir(folder)
        except OSError:
            return ()  # a provider may bring denials alone
        return tuple(Archive(folder / n, self.name) for n in names if n.endswith(SUFFIX))

    def mismatch(self, core: str) -> str | None:
        """Why it does not go with version ``core`` of this package, or None if it does."""
        if self.name == CORE:
            return None
        ours = self.name.startswith(f"{CORE}-")  # and so of the same versions
        accepted = release_line(core)
        remedy = (
            f"`pip install '{self.name}{accepted}'`"
            if ours
            else f"install the {self.name} that goes with {core}"
        )
        if not _within(core, self.core):
            return (
                f"{self.name} {self.version} is made for {CORE} {self.core}, but {CORE} {core} is "
                f"installed; `pip install '{CORE}{self.core}'`, or {remedy}"
            )
        if ours and not _within(self.version, accepted):
            return (
                f"{CORE} {core} goes with {self.name} {accepted}, but {self.name} {self.version} is "
                f"installed; {remedy}"
            )
        return None


def installed() -> tuple[tuple[Provider, ...], tuple[ProviderError, ...]]:
    """Every provider on this machine that is intact, this package first, and what is wrong with the
    others. Whether one fits is for ``Provider.mismatch`` to say.

    This package's own archives lie beside its code, wherever that is and whatever installed it.
    """
    providers: list[Provider] = []
    errors = []
    try:
        providers.append(read(CORE, __version__, Path(__file__).parents[1]))
    except ProviderError as error:
        errors.append(error)
    for distribution in distributions.mentioning(GROUP):
        if distribution.name == CORE:
            continue  # of another copy, or left by one
        try:
            for folder in _folders(distribution):
                providers.append(read(distribution.name, distribution.version, folder))
        except ProviderError as error:
            errors.append(error)
    providers.sort(key=lambda provider: (provider.name != CORE, provider.name))
    return tuple(providers), tuple(errors)


def _folders(distribution: Installed) -> Iterator[Path]:
    """The folders of the packages that a distribution's entry points name."""
    name, version = distribution.name, distribution.version
    try:
        points = list(Distribution.at(distribution.folder).entry_points.select(group=GROUP))
    except (TypeError, ValueError) as error:  # as lines that are not name = value make it raise
        raise ProviderError(
            f"{name} {version}: {distribution.folder / 'entry_points.txt'} cannot be read: "
            f"{error}; reinstall {name}"
        ) from error
    for point in points:
        if not point.value.isidentifier():
            raise ProviderError(
                f"{name} {version}: its entry point {point.name} = {point.value!r} must name a "
                "top-level package"
            )
        try:
            spec = importlib.util.find_spec(point.value)
        except (ImportError, ValueError) as error:
            raise ProviderError(
                f"{name} {version}: its package {point.value!r} cannot be found: {error}"
            ) from error
        folders = list(spec.submodule_search_locations or ()) if spec else []
        if not folders:
            raise ProviderError(
                f"{name} {version}: its package {point.value!r} is not installed; reinstall {name}"
            )
        yield Path(folders[0])


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


def core_range(version: str) -> str:
    """The versions that go with what ``version`` compiles: itself and later ones, up to the next that
    may change the archives' format or the kernels' parameters (a major one; before 1.0, a minor)."""
    from packaging.version import Version

    own = Version(version)
    return f">={own.public},<{_following(own)}"


def release_line(version: str) -> str:
    """The versions of this project's own providers that go with ``version`` of this package: all below the next
    incompatible version, as long as they accept ``version``, too."""
    from packaging.version import Version

    own = Version(version)
    return f">={own.major if own.major else f'0.{own.minor}'}.dev0,<{_following(own)}"


def _following(own: Any) -> str:
    return f"{own.major + 1}" if own.major else f"0.{own.minor + 1}"


def _within(version: str, stated: str) -> bool:
    from packaging.specifiers import SpecifierSet

    try:
        return SpecifierSet(stated).contains(version, prereleases=True)
    except ValueError:  # a folder's name that holds no version
        return False


def _is_named(archive: Archive) -> bool:
    """Whether the file is named after an architecture."""
    try:
        return bool(archive.arch)
    except ArchiveError:
        return False


def _is_range(text: str) -> bool:
    """Whether it states a range of versions; an empty text would not."""
    # Imported where it is needed: in most environments this package is the only provider.
    from packaging.specifiers import SpecifierSet

    try:
        stated = SpecifierSet(text)
        stated.contains("0.1", prereleases=True)
    except ValueError:  # InvalidSpecifier is one, and so are numbers that are too long
        return False
    return len(stated) > 0


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
    return core, dict(map(_denial, listed))


def _denial(entry: Any) -> tuple[str, str]:
    """The subject and the reason. What could match nothing is refused: it would deny nothing."""
    fields = entry if isinstance(entry, dict) else {}
    if ("sha256" in fields) == ("variant" in fields) or not isinstance(fields.get("reason"), str):
        raise ValueError(
            f"denied has {entry!r}; accepted are objects with either sha256 or variant, and with "
            "reason, a text"
        )
    subject = fields.get("sha256", fields.get("variant"))
    if "sha256" in fields:
        if not (isinstance(subject, str) and re.fullmatch(_SHA256, subject)):
            raise ValueError(
                f"denied has sha256 {subject!r}; accepted are 64 hexadecimal digits in lower case"
            )
    else:
        try:
            subject = str(Variant.parse(str(subject)))
        except ValueError as error:
            raise ValueError(f"denied has a variant that is none: {error}") from error
    return subject, f"denied: {fields['reason']}"
