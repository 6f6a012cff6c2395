"""What a release has to pass, checked on its files. Each gate says what it looked at.

    python ci/gates.py DIST [--again OTHER] [--rebuild N]

``--again``    the same products, built a second time elsewhere: every file must be the same
``--rebuild``  compile every Nth binary anew, without any cache, and compare; 1 for all of them, 0 for none

Needs the wheel of any job installed, the compilers and the tools of requirements.txt; no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# After everything that is installed: beside this folder lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from ci import cross, disassembly, sbom, vectors
from ci.matrix import Matrix, load
from ci.workspace import PACKAGE, ROOT
from scan_registry.aot.compile import refuse_spill
from scan_registry.aot.toolchain import CompileError
from scan_registry.artifact.archive import SUFFIX, Archive
from scan_registry.catalog.inventory import worst_attestations
from scan_registry.diagnostics.verify import check, rebuild
from scan_registry.packaging.wheel import Wheel

SIZES = ROOT / "ci" / "sizes.json"
_MOST = 5  # lines of one gate
_CPU = f"{PACKAGE}/ops/_cpu.abi3.so"
#: A manylinux tag, in the name of a wheel and in what auditwheel shows: the glibc that it needs, and the
#: machine.
_GLIBC = r"manylinux_(\d+)_(\d+)_(\w+)"
_SHOWN = re.compile(rf'is consistent with the following platform tag: "{_GLIBC}"')


@dataclass(frozen=True)
class Gate:
    """A gate's outcome: what was looked at, and what is wrong with it."""

    name: str
    looked_at: str
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Release:
    """The files of a release, and the archives of its default wheel as files."""

    dist: Path
    archives: tuple[Archive, ...]
    matrix: Matrix

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.dist.rglob("*") if path.is_file())

    def wheels(self, *folders: str) -> list[Path]:
        return [path for folder in folders for path in sorted((self.dist / folder).glob("*.whl"))]


def opened(dist: Path, place: Path, matrix: Matrix) -> Release:
    """The release in a folder; its archives are unpacked into ``place``."""
    for path in (dist / "pypi").glob(f"{PACKAGE}-*.whl"):
        for name, content in Wheel.read(path).files.items():
            if name.endswith(SUFFIX):
                (place / Path(name).name).write_bytes(content)
    archives = (Archive(place / f"{arch.label}{SUFFIX}") for arch in matrix.archs)
    return Release(dist, tuple(archives), matrix)


# --- The binaries -----------------------------------------------------------------------------


def intact(release: Release) -> Gate:
    """Every binary is what its manifest says, its ELF's architecture first of all, and what the shipped
    sources and options give."""
    attested, wrong, count = worst_attestations(ROOT / "kernels"), [], 0
    for archive in release.archives:
        count += len(archive.binaries)
        wrong += map(str, check(archive, archive.binaries, attested))
    return Gate("intact", f"{count} binaries", tuple(wrong))


def unspilled(release: Release) -> Gate:
    """No binary spills registers unless its spec allows it."""
    wrong, count = [], 0
    for archive in release.archives:
        for binary in archive.binaries:
            count += 1
            try:
                refuse_spill(binary)
            except CompileError as error:
                wrong.append(str(error))
    return Gate("no spills", f"{count} binaries", tuple(wrong))


def attested(release: Release, folder: Path = ROOT / "kernels") -> Gate:
    """Every binary of the architectures that the matrix names has passed on a GPU."""
    attested, wrong, count = worst_attestations(folder), [], 0
    needed = {arch.label for arch in release.matrix.archs if arch.attested}
    for archive in release.archives:
        if archive.arch.label not in needed:
            continue
        for binary in archive.binaries:
            count += 1
            attestation = attested.get(binary.sha256)
            if attestation is None or not attestation.passed:
                wrong.append(f"{binary}: {'no attestation' if attestation is None else 'failed'}")
    return Gate("attested", f"{count} binaries of {', '.join(sorted(needed))}", tuple(wrong))


def rebuilt(release: Release, every: int) -> Gate:
    """Compiled again here, without a cache, every ``every``th binary is the same."""
    rows = [(archive, binary) for archive in release.archives for binary in archive.binaries]
    chosen = rows[::every]
    wrong = [
        f"{comparison.binary}: {comparison.outcome}: {comparison.reason}"
        for comparison in rebuild(chosen, len(os.sched_getaffinity(0)))
        if comparison.outcome != "identical"
    ]
    return Gate("rebuilt", f"{len(chosen)} of {len(rows)} binaries", tuple(wrong))


def copied(release: Release) -> Gate:
    """No asynchronous copy has its cache hint where the hardware does not look for it; every architecture
    has some copies, or this gate has lost sight of them."""
    rows = []
    for archive in release.archives:
        if not archive.arch.is_ptx:
            contents = ((binary, archive.read(binary)) for binary in archive.binaries)
            rows += [(archive, *pair) for pair in contents if disassembly.may_copy(pair[1])]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        per_binary = list(threads.map(disassembly.copies, (content for _, _, content in rows)))
    wrong, seen = [], set()
    for (archive, binary, _), copies in zip(rows, per_binary, strict=True):
        seen |= {archive.arch} if copies else set()
        wrong += [f"{binary}: {copy}" for copy in copies if disassembly.broken(copy)]
    wrong += [
        f"{archive.arch.label}: no asynchronous copies were found"
        for archive in release.archives
        if not archive.arch.is_ptx and archive.arch not in seen
    ]
    return Gate("copies", f"{sum(map(len, per_binary))} in {len(rows)} binaries", tuple(wrong))


def identical(release: Release, again: Path) -> Gate:
    """Two builds give the same files."""
    ours = {path.relative_to(release.dist): path.read_bytes() for path in release.files}
    theirs = {p.relative_to(again): p.read_bytes() for p in again.rglob("*") if p.is_file()}
    wrong = [f"{name}: in one build only" for name in sorted(ours.keys() ^ theirs.keys())]
    wrong += [f"{name}: differs" for name in sorted(ours) if ours[name] != theirs.get(name, b"")]
    return Gate("two builds", f"{len(ours)} files", tuple(dict.fromkeys(wrong)))


# --- The packages -----------------------------------------------------------------------------


def sizes(release: Release) -> dict[str, int]:
    """Bytes of every archive, and of every file for indexes that take no local versions."""
    sizes = {archive.arch.label: archive.path.stat().st_size for archive in release.archives}
    return sizes | {_nameless(path): path.stat().st_size for path in release.wheels("pypi")}


def _nameless(path: Path) -> str:
    """A wheel's name without its version, so that wheels of two releases can be matched."""
    name, _, *tags = path.name.split("-")
    return "-".join([name, *tags])


def budgets(release: Release) -> Gate:
    """No archive and no wheel is larger than the matrix allows; says what the last release's were."""
    limits = {arch.label: arch.budget for arch in release.matrix.archs}
    last: dict[str, int] = json.loads(SIZES.read_text(encoding="utf-8"))
    wrong = []
    for name, size in sizes(release).items():
        limit = limits.get(name, release.matrix.wheel_budget)
        change = f", {size - last[name]:+,} since the last release" if name in last else ", new"
        print(f"  {name}: {size:,} of {limit:,} bytes{change}")
        if size > limit:
            wrong.append(f"{name}: {size:,} bytes; its budget is {limit:,}")
    return Gate("sizes", f"{len(sizes(release))} files", tuple(wrong))


def complete(release: Release) -> Gate:
    """Every wheel installs one name and carries licence and bill of materials."""
    wrong, count = [], 0
    for path in release.wheels("pypi", "index"):
        wheel = Wheel.read(path)
        count += 1
        names = {name.split("/")[0] for name in wheel.files}
        if names != {wheel.name}:
            wrong.append(f"{path.name} installs {', '.join(sorted(names))}")
        for needed in ("licenses/LICENSE", sbom.PATH):
            if needed not in wheel.information:
                wrong.append(f"{path.name} has no {needed}")
    return Gate("complete", f"{count} wheels", tuple(wrong))


def _tool(title: str, *words: str | Path) -> Iterator[str]:
    """Run a tool of this environment; what it printed, where it failed."""
    command = [str(Path(sys.executable).with_name(str(words[0]))), *map(str, words[1:])]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if result.returncode:
        yield f"{title}: {(result.stdout + result.stderr).strip()}"


def metadata(release: Release) -> Gate:
    """twine and check-wheel-contents find nothing wrong."""
    files = [path for path in release.files if path.parent.name in ("pypi", "index")]
    wheels = release.wheels("pypi", "index")
    wrong = list(_tool("twine", "twine", "check", "--strict", *files))
    # W002: files with the same content, such as the empty ones of packages. W004: the packages' names
    # are checked above.
    for path in wheels:
        top = Wheel.read(path).name
        wrong += _tool(
            f"check-wheel-contents {path.name}",
            *("check-wheel-contents", "--ignore", "W002", "--toplevel", top, path),
        )
    return Gate("metadata", f"{len(files)} files", tuple(wrong))


def portable(release: Release, compiled_here: bool) -> Gate:
    """The machine code for CPUs is for the machine of its tag, and needs no later glibc than the tag
    promises, and only the stable ABI. Each tag of the matrix has a wheel, and no wheel has another tag.
    Wheels that were not compiled in the matrix's containers may have any manylinux tag."""
    wrong, wheels = [], _compiled(release, "pypi", "index")
    accepted = {platform.tag for platform in release.matrix.platforms}
    tags = set()
    for path in wheels:
        platform = _platform(path)
        tags.add(platform)
        if not (compiled_here and platform.startswith("manylinux")) and platform not in accepted:
            wrong.append(f"{path.name}: is not for {' or '.join(sorted(accepted))}")
        wrong += [f"{path.name}: {symbol}" for symbol in _beyond(path, platform)]
        wrong += _tool(f"{path.name}: abi3audit", "abi3audit", "--strict", path)
    if not compiled_here:
        wrong += [f"there is no wheel for {tag}" for tag in sorted(accepted - tags)]
    return Gate("portable", f"{len(wheels)} wheels, {', '.join(sorted(tags))}", tuple(wrong))


def _compiled(release: Release, *folders: str) -> list[Path]:
    """The wheels with machine code for CPUs."""
    return [path for path in release.wheels(*folders) if "-abi3-" in path.name]


def _platform(path: Path) -> str:
    return path.name.removesuffix(".whl").rpartition("-")[2]


def _beyond(path: Path, platform: str) -> Iterator[str]:
    """What the machine code needs and the tag does not promise: another machine, smaller pages, or a later
    glibc."""
    promised = re.fullmatch(_GLIBC, platform)
    machine = platform if promised is None else promised[3]
    if machine in cross.MACHINES:
        files = Wheel.read(path).files
        wrong = cross.foreign(files, machine)
        yield from (f"{name} is not machine code for {machine}" for name in wrong)
        for name in () if wrong else cross.crowded(files, machine):
            yield f"{name} does not load where pages have {cross.PAGES[machine]} bytes"
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("auditwheel")), "show", str(path)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    needed = _SHOWN.search(" ".join(shown.stdout.split()))
    if shown.returncode or promised is None or needed is None:
        yield f"auditwheel: {shown.stdout}{shown.stderr}"
    elif needed[3] != machine or _glibc(needed) > _glibc(promised):
        yield f"needs manylinux_{needed[1]}_{needed[2]}_{needed[3]}"


def _glibc(tag: re.Match[str]) -> tuple[int, int]:
    return int(tag[1]), int(tag[2])


def vectorised(release: Release) -> Gate:
    """The CPU kernels for aarch64 compute in vector registers."""
    wrong = []
    paths = [path for path in _compiled(release, "pypi") if _platform(path).endswith("_aarch64")]
    for path in paths:
        try:
            functions = vectors.functions(Wheel.read(path).files[_CPU])
        except ValueError as error:
            wrong.append(f"{path.name}: {_CPU} {error}")
        else:
            wrong += [f"{path.name}: {line}" for line in vectors.scalar(functions)]
    return Gate("vectors", f"{len(paths)} wheels for aarch64", tuple(wrong))


# --- All of them ------------------------------------------------------------------------------


def gates(
    release: Release, again: Path | None, every: int, compiled_here: bool
) -> Iterator[Callable[[], Gate]]:
    yield lambda: intact(release)
    yield lambda: unspilled(release)
    yield lambda: attested(release)
    yield lambda: copied(release)
    if every:
        yield lambda: rebuilt(release, every)
    if again is not None:
        yield lambda: identical(release, again)
    yield lambda: budgets(release)
    yield lambda: complete(release)
    yield lambda: metadata(release)
    yield lambda: portable(release, compiled_here)
    yield lambda: vectorised(release)


def judge(gate: Gate) -> bool:
    """Print a gate's outcome; whether it passed."""
    print(f"{'FAILED' if gate.wrong else 'passed'}  {gate.name}: {gate.looked_at}", flush=True)
    for text in gate.wrong[:_MOST]:
        print(f"  {text}")
    if len(gate.wrong) > _MOST:
        print(f"  and {len(gate.wrong) - _MOST} more")
    return not gate.wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the files of a release.")
    parser.add_argument("dist", type=Path)
    parser.add_argument("--again", type=Path, help="the same products, built elsewhere")
    parser.add_argument("--rebuild", type=int, default=1, metavar="N", help="every Nth; 0: none")
    parser.add_argument(
        "--unpacked", type=Path, required=True, help="an empty folder, for archives"
    )
    parser.add_argument(
        "--compiled-here", action="store_true", help="not in the matrix's containers: any manylinux"
    )
    parser.add_argument("--record", action="store_true", help="keep the sizes in ci/sizes.json")
    args = parser.parse_args(argv)
    args.unpacked.mkdir(parents=True, exist_ok=True)
    release = opened(args.dist, args.unpacked, load())
    outcomes = [
        judge(gate()) for gate in gates(release, args.again, args.rebuild, args.compiled_here)
    ]
    if args.record and all(outcomes):
        SIZES.write_text(json.dumps(sizes(release), indent=1) + "\n", encoding="utf-8")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
