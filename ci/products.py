"""The released packages, made from the wheels that the build jobs made. Nothing is compiled.

    python ci/products.py DIST WHEEL …

    DIST/pypi       scan-registry with every archive (the default), one package per archive, for an
                    index that takes no local versions
    DIST/index      the same with the toolchain as a local label (0.1.0+cu129), and the core without
                    archives (0.1.0+core), for the project's own index
    DIST/variants   see variants.py

Needs the wheel of any job installed, without torch. The version is stated in scan_registry/version.py alone.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# After everything that is installed: beside this folder lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from ci import sbom, variants
from ci.matrix import Matrix, load
from ci.workspace import PACKAGE, ROOT, DevError
from scan_registry.artifact.archive import SUFFIX, Archive, ArchiveError
from scan_registry.hardware.target import Target
from scan_registry.packaging.package import Package
from scan_registry.packaging.wheel import Wheel

ARCHIVES = f"{PACKAGE}/archives"
VERSION_FILE = f"{PACKAGE}/version.py"
CORE_LABEL = "core"


@dataclass(frozen=True)
class Parts:
    """What the jobs have made: the package for each platform, and whole archives."""

    cores: tuple[Wheel, ...]
    archives: Mapping[Target, bytes]

    @property
    def version(self) -> str:
        return self.cores[0].version


def parts(wheels: Iterable[Wheel], matrix: Matrix) -> Parts:
    """``DevError`` if the jobs' wheels do not make up a release: if an archive is missing, or there
    twice with other bytes, or was compiled from another version or commit than the others."""
    cores: dict[str, Wheel] = {}
    archives: dict[Target, bytes] = {}
    for wheel in wheels:
        core = cores.setdefault(wheel.tag, wheel.without(ARCHIVES))
        if wheel.without(ARCHIVES).version != core.version or _code(wheel) != _code(core):
            raise DevError(f"two builds of {core.file_name} differ in more than their archives")
        for name, content in wheel.files.items():
            if name.startswith(f"{ARCHIVES}/"):
                target = Target.parse(Path(name).name.removesuffix(SUFFIX))
                if archives.setdefault(target, content) != content:
                    raise DevError(f"two builds of the archive for {target} differ")
    if not cores:
        raise DevError("there is no wheel to make a release from")
    _check_alike(*cores.values())
    wanted = [Target.parse(arch.label) for arch in matrix.archs]
    if missing := [target.label for target in wanted if target not in archives]:
        raise DevError(f"no build has an archive for {', '.join(missing)}")
    release = Parts(tuple(cores.values()), {target: archives[target] for target in wanted})
    _check_origin(release)
    return release


def _check_alike(first: Wheel, *others: Wheel) -> None:
    for other in others:
        if other.version != first.version:
            raise DevError(f"{first.file_name} and {other.file_name} are of different versions")
        if _code(other) != _code(first):
            what = "differ in more than machine code for CPUs"
            raise DevError(f"{first.file_name} and {other.file_name} {what}")


def _code(wheel: Wheel) -> Mapping[str, bytes]:
    """What a wheel installs beside archives and machine code for the CPU, which containers may
    compile differently."""
    return {n: c for n, c in wheel.without(ARCHIVES).files.items() if not n.endswith(".so")}


def _check_origin(release: Parts) -> None:
    origins: dict[tuple[object, ...], list[str]] = {}
    with opened(release.archives) as archives:
        for archive in archives:
            facts = tuple(archive.manifest.get(name) for name in ("version", "commit", "dirty"))
            origins.setdefault(facts, []).append(archive.arch.label)
    if len(origins) > 1:
        listing = "; ".join(f"{', '.join(labels)}: {facts}" for facts, labels in origins.items())
        raise DevError(f"the archives were not compiled from the same commit: {listing}")
    ((stated, *_),) = origins
    if stated != release.version:
        raise DevError(f"the archives were compiled by {stated}, the package is {release.version}")


@contextmanager
def opened(archives: Mapping[Target, bytes]) -> Iterator[list[Archive]]:
    """The archives as files, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        for target, content in archives.items():
            Path(folder, f"{target.label}{SUFFIX}").write_bytes(content)
        yield [Archive(Path(folder, f"{target.label}{SUFFIX}")) for target in archives]


# --- The products -----------------------------------------------------------------------------


def fat(core: Wheel, archives: Mapping[Target, bytes]) -> Wheel:
    """The package with archives: all of them in the default wheel."""
    files = {f"{ARCHIVES}/{target.label}{SUFFIX}": text for target, text in archives.items()}
    return billed(core.with_files(files), archives)


def provider(release: Parts, target: Target) -> Wheel:
    """The package of one architecture's archive."""
    licence = (ROOT / "LICENSE").read_bytes()
    package = Package(
        target.label,
        release.version,
        release.version,
        {target: release.archives[target]},
        metadata=(f"License-Expression: {sbom.LICENCE}", "License-File: LICENSE"),
        description=_DESCRIPTION.format(label=target.label),
        information={"licenses/LICENSE": licence},
    )
    return billed(package.wheel(), package.archives)


def billed(wheel: Wheel, archives: Mapping[Target, bytes]) -> Wheel:
    with opened(archives) as files:
        return wheel.with_information({sbom.PATH: sbom.bill(wheel, files)})


def relabelled(wheel: Wheel, label: str, archives: Mapping[Target, bytes]) -> Wheel:
    """The same under a local version, which its code and its bill name, too."""
    version = f"{wheel.version}+{label}"
    renamed = wheel.with_version(version)
    if VERSION_FILE in wheel.files:
        before, after = (f'__version__ = "{text}"\n'.encode() for text in (wheel.version, version))
        stated = wheel.files[VERSION_FILE]
        if stated.count(before) != 1:
            raise DevError(f"{wheel.file_name}: {VERSION_FILE} does not state {wheel.version} once")
        renamed = renamed.with_files({VERSION_FILE: stated.replace(before, after)})
    return billed(renamed, archives)


def write(release: Parts, matrix: Matrix, folder: Path) -> list[Path]:
    """Write every product, and return the files."""
    wholes = [fat(core, release.archives) for core in release.cores]
    providers = {target: provider(release, target) for target in release.archives}
    paths = [wheel.write(folder / "pypi") for wheel in (*wholes, *providers.values())]
    labelled = [relabelled(wheel, matrix.label, release.archives) for wheel in wholes]
    labelled += [
        relabelled(wheel, matrix.label, {target: release.archives[target]})
        for target, wheel in providers.items()
    ]
    labelled += [relabelled(core, CORE_LABEL, {}) for core in release.cores]
    paths += [wheel.write(folder / "index") for wheel in labelled]
    with_ptx = {
        target: {t: text for t, text in release.archives.items() if t == target or t.is_ptx}
        for target in release.archives
        if not target.is_ptx
    }
    for core, whole in zip(release.cores, wholes, strict=True):
        by_target = {target: fat(core, contents) for target, contents in with_ptx.items()}
        paths += variants.write(whole, by_target, folder / "variants")
    return paths


_DESCRIPTION = """\
GPU kernels of `scan-registry`, compiled ahead of time for `{label}`. This package holds data and no
code; `scan-registry` finds it once it is installed.
"""


def table(folder: Path, paths: Iterable[Path]) -> None:
    """What was written: name, size, and how many binaries it holds."""
    print(f"{'MB':>8}  {'binaries':>8}  package")
    for path in sorted(paths):
        count = sum(len(archive.binaries) for archive in _archives_in(path))
        print(f"{path.stat().st_size / 1e6:8.2f}  {count:8}  {path.relative_to(folder)}")


def _archives_in(path: Path) -> Iterator[Archive]:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name.endswith(SUFFIX):
                yield Archive(Path(wheel.extract(name, folder)))


def main() -> int:
    folder, *names = map(Path, sys.argv[1:])
    try:
        paths = write(parts(map(Wheel.read, names), load()), load(), folder)
        table(folder, (path for path in paths if path.suffix == ".whl"))
    except (ArchiveError, DevError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
