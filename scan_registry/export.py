"""A cache of compiled binaries, turned into a package that other machines install.

The package is a provider (see ``providers``) and holds no code:

    <folder>/pyproject.toml                            setuptools makes a wheel from it
    <folder>/scan_registry_<label>/__init__.py
    <folder>/scan_registry_<label>/provider.json
    <folder>/scan_registry_<label>/archives/<arch>.scanreg

The same binaries give the same bytes, in the folder and in the wheel alike.
"""

from __future__ import annotations

import json
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from packaging.version import InvalidVersion, Version

from scan_registry import archive
from scan_registry.aot.pack import tunings
from scan_registry.archive import Archive, ArchiveError, Binary
from scan_registry.cache import Cache
from scan_registry.kernels import families
from scan_registry.providers import CORE, GROUP, MANIFEST, SCHEMA
from scan_registry.target import Target
from scan_registry.verify import origin

Row = tuple[Archive, Binary]

_NO_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can state
_PLAIN_FILE = 0o100644 << 16


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
        found = Cached(entry, status.st_size, status.st_mtime)
        try:
            binary = _only_binary(cache, entry)
        except (ArchiveError, ValueError) as error:
            yield replace(found, damage=str(error).removeprefix(f"{entry.path}: "))
        else:
            yield replace(found, binary=binary, stale=origin(binary))


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
    best: dict[tuple[Target, str], Row] = {}
    left_out = []
    for entry in sorted(entries, key=_newest_first):
        reason, binary = entry.damage or entry.stale, entry.binary
        if binary is not None and reason is None:
            variant = str(binary.variant)
            reason = denied.get(binary.sha256) or denied.get(variant)
            if reason is None:
                row = entry.archive, binary
                _, first = best.setdefault((entry.archive.arch, variant), row)
                if first is not binary:
                    reason = f"{first.compiler} has made it, too"
        if reason is not None:
            left_out.append((entry, reason))
    kernels = [kernel for family in families().values() for kernel in family.kernels]
    variants = [str(variant) for kernel in kernels for variant in kernel.every]
    taken = {
        target: tuple(best[target, v] for v in variants if (target, v) in best)
        for target in sorted({target for target, _ in best})
    }
    left_out.sort(key=lambda pair: str(pair[0].archive.path))
    return Choice(taken, tuple(left_out))


def _newest_first(entry: Cached) -> tuple[tuple[int, ...], str]:
    version = entry.binary.compiler.rpartition(" ")[2] if entry.binary else ""
    try:
        release = Version(version).release
    except InvalidVersion:
        release = ()
    return tuple(-number for number in (*release, 0)), str(entry.archive.path)


# --- The package ------------------------------------------------------------------------------


def core_range(version: str) -> str:
    """The versions that go with what ``version`` compiles: itself and later ones, up to the next that
    may change the archives' format or the kernels' parameters (a major one; before 1.0, a minor)."""
    own = Version(version)
    following = f"{own.major + 1}" if own.major else f"0.{own.minor + 1}"
    return f">={own.public},<{following}"


@dataclass(frozen=True)
class Package:
    """A provider package, made with version ``made_with`` of this one."""

    label: str
    made_with: str
    held: Mapping[Target, tuple[Row, ...]]

    @property
    def name(self) -> str:
        return f"{CORE}-{self.label.replace('_', '-')}"

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def core(self) -> str:
        return core_range(self.made_with)

    @property
    def version(self) -> str:
        """That of its maker, and a digest of what it holds: other binaries, another version."""
        held = [
            [str(target), binary.to_json()]
            for target, rows in self.held.items()
            for _, binary in rows
        ]
        digest = sha256(json.dumps([self.core, held]).encode()).hexdigest()
        return f"{Version(self.made_with).public}+c{digest[:12]}"

    @property
    def summary(self) -> str:
        return f"Kernels of {CORE} for {', '.join(target.label for target in self.held)}"

    def write(self, folder: Path) -> list[Path]:
        """Write the source folder, and return its files in order."""
        texts = {
            "pyproject.toml": _PROJECT.format(
                name=self.name,
                version=self.version,
                summary=self.summary,
                requirement=CORE + self.core,
                group=GROUP,
                label=self.label,
                module=self.module,
                manifest=MANIFEST,
            ),
            f"{self.module}/__init__.py": f'"""{self.summary}: archives, and no code."""\n',
            f"{self.module}/{MANIFEST}": json.dumps(
                {"schema": SCHEMA, "core": self.core, "denied": []}, indent=1
            )
            + "\n",
        }
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        provenance = {"version": self.made_with, "commit": None, "dirty": None}
        paths = [folder / name for name in texts]
        for target, rows in self.held.items():
            path = folder / self.module / "archives" / f"{target.label}{archive.SUFFIX}"
            binaries = [(binary, held.read(binary)) for held, binary in rows]
            archive.write(path, target, binaries, provenance, tunings(target))
            paths.append(path)
        return paths

    def write_wheel(self, folder: Path, sources: Sequence[Path]) -> Path:
        """Write the wheel of a source folder's package files into ``folder / "dist"``."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sources
            if path.parent != folder
        }
        information = f"{self.module}-{self.version}.dist-info"
        for name, template in _INFORMATION.items():
            files[f"{information}/{name}"] = template.format(
                name=self.name,
                version=self.version,
                summary=self.summary,
                requirement=CORE + self.core,
                maker=f"{CORE} {self.made_with}",
                group=GROUP,
                label=self.label,
                module=self.module,
            ).encode()
        record = [f"{name},sha256={_encoded(text)},{len(text)}\n" for name, text in files.items()]
        files[f"{information}/RECORD"] = "".join([*record, f"{information}/RECORD,,\n"]).encode()
        path = folder / "dist" / f"{self.module}-{self.version}-py3-none-any.whl"
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in files.items():
                entry = zipfile.ZipInfo(name, _NO_TIME)
                entry.create_system, entry.external_attr = 3, _PLAIN_FILE
                wheel.writestr(entry, content, zipfile.ZIP_DEFLATED)
        return path


def _encoded(content: bytes) -> str:
    return urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()


_PROJECT = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "{summary}"
requires-python = ">=3.10"
dependencies = ["{requirement}"]

[project.entry-points."{group}"]
{label} = "{module}"

[tool.setuptools]
packages = ["{module}"]
include-package-data = false

[tool.setuptools.package-data]
{module} = ["{manifest}", "archives/*.scanreg"]
"""

_INFORMATION = {
    "METADATA": """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: {summary}
Requires-Python: >=3.10
Requires-Dist: {requirement}
""",
    "WHEEL": """\
Wheel-Version: 1.0
Generator: {maker}
Root-Is-Purelib: true
Tag: py3-none-any
""",
    "entry_points.txt": """\
[{group}]
{label} = {module}
""",
}
