"""The two commands of a working copy: see the package work, and test it.

    python3 tools/dev.py demo           build the wheel, install it, look inside, run its self-test
    python3 tools/dev.py test [ARG …]   the same wheel, then ruff, mypy, attestations and pytest

``types`` runs mypy alone, for the commit hook.

Needs Linux, Python 3.10 or later and a C compiler; no GPU, no CUDA toolkit. Everything that it makes
is under build/dev. The wheel is built anew each time, through the PEP 517 backend in an isolated
environment as pip would for a user, so that what is tested is this tree, installed. Compiled kernels
come from the build cache where they have not changed.

Torch is the version that ci/constraints.txt names. Where pip is to find it (on a machine without a
GPU, usually an index of CPU builds) is up to pip's own configuration.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "dev"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
PACKAGE = "scan_registry"
DISTRIBUTION = "scan-registry"

#: What the wheel has to hold for it to work, as endings of file names.
REQUIRED = (
    f"{PACKAGE}/_launcher.abi3.so",
    f"{PACKAGE}/_launcher.pyi",
    f"{PACKAGE}/_signature.abi3.so",
    f"{PACKAGE}/_cpu.abi3.so",
    f"{PACKAGE}/py.typed",
    "/spec.py",
    ".cu",
    ".cuh",
    ".scanreg",
)


class DevError(Exception):
    """Something that ends the command; the message says what and, where known, what to do."""


# --- What is being done -----------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def run(
    title: str,
    command: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
) -> int:
    """Run one step with its output on the terminal; return its exit status."""
    say(f"\n=== {title}\n$ {' '.join(map(str, command))}")
    started = time.monotonic()
    status = subprocess.run(list(map(str, command)), cwd=cwd, check=False).returncode
    say(f"--- {title}: {time.monotonic() - started:.1f} s, exit {status}")
    return status


def require(title: str, command: Sequence[str | Path], *, cwd: Path = ROOT) -> None:
    """A step without which the rest makes no sense."""
    if status := run(title, command, cwd=cwd):
        raise DevError(f"{title} failed with exit status {status}")


# --- The environment --------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """The virtual environment that the wheel is installed in."""

    folder: Path

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    @property
    def python(self) -> Path:
        return self.program("python")

    def pip(self, *words: str | Path) -> list[str | Path]:
        return [self.python, "-m", "pip", *words]

    @property
    def stamp(self) -> Path:
        return self.folder / "made-for"

    def identity(self) -> str:
        """What makes an environment of another day unusable: its place, and its Python."""
        return f"{self.folder}\n{sys.base_prefix}\n{sys.version}\n"

    def healthy(self) -> bool:
        if not self.stamp.is_file() or self.stamp.read_text() != self.identity():
            return False
        probe = [str(word) for word in self.pip("--version")]
        return subprocess.run(probe, stdout=subprocess.DEVNULL, check=False).returncode == 0


def check_machine() -> None:
    """Refuse what would fail in the middle of the build, with the remedy."""
    if sys.version_info < (3, 10):  # noqa: UP036  the message is for exactly those who have less
        raise DevError(f"Python 3.10 or later is needed; this is {sys.version.split()[0]}")
    if not sys.platform.startswith("linux"):
        raise DevError(f"Linux is needed; this is {sys.platform}")
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise DevError(
            f"the C compiler {compiler!r} is not installed; install gcc, or name yours in CC"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise DevError(f"{header} is missing; install Python's development package (python3-dev)")


def make_environment(fresh: bool) -> Environment:
    """The environment of build/dev, made anew if asked for or if the one there does not work."""
    environment = Environment(WORK / "venv")
    if not fresh and environment.healthy():
        say(f"using the environment in {environment.folder.relative_to(ROOT)}")
        return environment
    say(f"making an environment in {environment.folder.relative_to(ROOT)}")
    try:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=True).create(environment.folder)
    except subprocess.CalledProcessError as error:
        raise DevError(
            f"{sys.executable} cannot make a virtual environment with pip: {error}\n"
            "on Debian and Ubuntu, install python3-venv"
        ) from error
    environment.stamp.write_text(environment.identity())
    return environment


# --- The wheel --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wheel:
    """A wheel that passed ``check_wheel``, and what it would install."""

    path: Path
    size: int
    top_level: tuple[str, ...]
    archives: Mapping[str, int]

    def __str__(self) -> str:
        held = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in self.archives.items())
        return (
            f"{self.path.name}: {self.size / 1e6:.2f} MB\n"
            f"installs: {', '.join(self.top_level)}\n"
            f"archives: {held}"
        )


def check_wheel(path: Path) -> Wheel:
    """Look into a wheel; ``DevError`` unless it installs the one package, complete.

    Files that a wheel puts elsewhere (its ``.data`` folder) count under the place they go to.
    """
    with zipfile.ZipFile(path) as wheel:
        if broken := wheel.testzip():
            raise DevError(f"{path.name}: {broken} is damaged")
        files = {entry.filename: entry.file_size for entry in wheel.infolist()}
    folders = {name.split("/")[0] for name in files}
    top_level = tuple(sorted(name for name in folders if not name.endswith(".dist-info")))
    if top_level != (PACKAGE,):
        raise DevError(
            f"{path.name} installs {', '.join(top_level) or 'nothing'}; it must be {PACKAGE} alone"
        )
    missing = [ending for ending in REQUIRED if not any(name.endswith(ending) for name in files)]
    if missing:
        raise DevError(f"{path.name} has no file that ends in {' or '.join(missing)}")
    archives = {
        Path(name).stem: size for name, size in sorted(files.items()) if name.endswith(".scanreg")
    }
    return Wheel(path, path.stat().st_size, top_level, archives)


def build_wheel(environment: Environment) -> Wheel:
    """Build the wheel for every architecture as pip builds it for a user: isolated, by PEP 517."""
    folder, log = WORK / "wheel", WORK / "build.log"
    shutil.rmtree(folder, ignore_errors=True)
    command = environment.pip("wheel", "-v", "--no-deps", "--config-settings", "archs=all")
    command += ["--wheel-dir", folder, ROOT]
    say(f"\n=== build the wheel (all of it in {log.relative_to(ROOT)})")
    say(f"$ {' '.join(map(str, command))}")
    started = time.monotonic()
    with (
        log.open("w") as record,
        subprocess.Popen(
            list(map(str, command)),
            cwd=WORK,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            record.write(line)
            if line.strip().startswith("scan-registry:"):
                say(f"  {line.strip()}")
    if process.returncode:
        last = log.read_text().rpartition("Running command ")[2]
        raise DevError(f"the wheel did not build (exit status {process.returncode}):\n{last}")
    (path,) = folder.glob("*.whl")
    say(f"--- build the wheel: {time.monotonic() - started:.1f} s")
    wheel = check_wheel(path)
    say(str(wheel))
    return wheel


def install(environment: Environment, wheel: Wheel, extra: str = "") -> None:
    """Torch first, at the pinned version, and then exactly this wheel.

    The version does not change from build to build, so an installed one is removed beforehand.
    The constraints hold for this environment only; the build's own has its pins in the backend.
    """
    pinned = ("--constraint", CONSTRAINTS)
    require("install torch", environment.pip("install", "-q", *pinned, "torch"))
    remove = environment.pip("uninstall", "-q", "-y", DISTRIBUTION)
    require("remove the last build", remove)
    require("install the wheel", environment.pip("install", "-q", *pinned, f"{wheel.path}{extra}"))
    # From a folder without the sources, as the tests are to see it.
    where = f"import {PACKAGE}, pathlib; print(pathlib.Path({PACKAGE}.__file__).parent)"
    result = subprocess.run(
        [environment.python, "-c", where], cwd=WORK, check=True, text=True, stdout=subprocess.PIPE
    )
    place = Path(result.stdout.strip())
    if not place.is_relative_to(environment.folder):
        raise DevError(
            f"{PACKAGE} is imported from {place}, not from the environment; is PYTHONPATH set?"
        )
    say(f"{PACKAGE} is imported from {place.relative_to(ROOT)}")


# --- The checks -------------------------------------------------------------------------------


def stage_for_types() -> Path:
    """The sources laid out as they are installed, by links, so that mypy sees the import names."""
    folder = WORK / "types"
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / PACKAGE
    package.mkdir(parents=True)
    for entry in (*(ROOT / PACKAGE).iterdir(), ROOT / "kernels", ROOT / "aot"):
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    return folder


def check_types(environment: Environment) -> int:
    """mypy on the whole package, with the environment's torch, from the staging folder."""
    command: list[str | Path] = [environment.program("mypy"), "--strict"]
    command += ["--config-file", ROOT / "pyproject.toml", "--cache-dir", WORK / "mypy"]
    return run("mypy", [*command, "-p", PACKAGE], cwd=stage_for_types())


def report_attestations(environment: Environment) -> None:
    """Say how many binaries a GPU has proven; a gate for releases, which a change need not pass."""
    command = [environment.python, ROOT / "tools" / "attest.py", "--check"]
    say(f"\n=== attestations (for information)\n$ {' '.join(map(str, command))}")
    result = subprocess.run(
        list(map(str, command)), cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE
    )
    lines = result.stdout.splitlines()
    if len(lines) > 1:
        say(f"({len(lines) - 1} lines, one per binary, left out)")
    say(f"{lines[-1] if lines else 'it says nothing'} (exit {result.returncode})")


def cores() -> int:
    return len(os.sched_getaffinity(0))


def pytest_arguments(given: Sequence[str], workers: int) -> list[str]:
    """One worker per core for the whole suite; a choice of tests is left as it was made."""
    return list(given) if given else ["-n", str(min(workers, 8))]


def check_all(environment: Environment, arguments: Sequence[str]) -> int:
    """Every check, in order, whether or not an earlier one failed; 0 if all passed.

    pytest comes last and has the last word on the terminal. It is started as the environment's
    program, not by ``-m``, which would put this folder, and with it the sources, on its path.
    """
    ruff = environment.program("ruff")
    failed = [
        title
        for title, status in (
            ("ruff check", run("ruff check", [ruff, "check", "."])),
            ("ruff format", run("ruff format", [ruff, "format", "--check", "."])),
            ("mypy", check_types(environment)),
        )
        if status
    ]
    report_attestations(environment)
    if failed:
        say(f"\nFAILED: {', '.join(failed)}; pytest follows, and the exit status will be 1")
    pytest = [environment.program("pytest"), *pytest_arguments(arguments, cores())]
    say(f"\n=== pytest\n$ {' '.join(map(str, pytest))}")
    status = subprocess.run(list(map(str, pytest)), cwd=ROOT, check=False).returncode
    return 1 if failed or status else 0


# --- The commands -----------------------------------------------------------------------------


def demo(fresh: bool) -> None:
    check_machine()
    environment = make_environment(fresh)
    install(environment, build_wheel(environment))
    program = environment.program(DISTRIBUTION)
    require("look inside", [program, "inspect"], cwd=WORK)
    require("self-test", [program, "selftest"], cwd=WORK)


def test(fresh: bool, arguments: Sequence[str]) -> int:
    check_machine()
    environment = make_environment(fresh)
    install(environment, build_wheel(environment), extra="[test]")
    return check_all(environment, arguments)


def types() -> int:
    """mypy alone, in the environment of the last test: for the hook that runs before a commit."""
    environment = Environment(WORK / "venv")
    if not (environment.healthy() and environment.program("mypy").is_file()):
        raise DevError(
            "there is no environment with mypy yet; run `python3 tools/dev.py test` once"
        )
    return check_types(environment)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("demo", "build, install, inspect, self-test"),
        ("test", "build, install, and run every check; further arguments go to pytest"),
    ):
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        command.add_argument("--fresh", action="store_true", help="make a new environment")
    commands.add_parser("types", help="mypy alone, in the environment that is there")
    options, rest = parser.parse_known_args()
    if rest and options.command != "test":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    WORK.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        if options.command == "types":
            return types()
        if options.command == "test":
            return test(options.fresh, rest)
        demo(options.fresh)
        say(f"\ndemo done in {time.monotonic() - started:.0f} s")
        return 0
    except DevError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
