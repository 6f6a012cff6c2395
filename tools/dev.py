"""The commands of a working copy: see the package work, and test it; and build the documentation.

    python3 tools/dev.py demo [--archs all]   build a wheel, install it, look inside, run its self-test
    python3 tools/dev.py test [--archs all] [--thorough] [ARG …]
                                              build the wheel, and ruff, mypy, import contracts, the site,
                                              attestations and pytest
    python3 tools/dev.py sources              of these, ruff, mypy, import contracts and the site alone
    python3 tools/dev.py site                 build the documentation into build/site, and no wheel

``demo`` compiles for the GPUs of this machine, or for ``ptx80`` where it has none. ``test`` compiles for ptx80, in the
least time. On pull requests another job builds for all, and fails where a kernel spills. After a change of kernels, run
``test --archs all``. Of tests with several parameters it runs so many combinations that all values occur; ``--thorough``
runs all of them, and what is marked thorough, as a workflow does once a week.

``sources`` and ``types``, which is mypy alone, for the commit hook, use the environment of the last test. ``test`` runs
``sources`` beside the installation of compilers and the wheel, and pytest, and shows what it has printed if a check fails.

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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

# After everything that is installed: beside this folder lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from ci import uv
from ci.workspace import (
    CONSTRAINTS,
    DISTRIBUTION,
    PACKAGE,
    REQUIREMENTS,
    ROOT,
    DevError,
    Environment,
    Wheel,
    archs_of_this_machine,
    build_wheel,
    check_machine,
    cores,
    make_environment,
    require,
    run,
    say,
)

WORK = ROOT / "build" / "dev"
#: What the site is built from, and the pinned programs that build it.
SITE = ROOT / "docs" / "mkdocs.yml"
SITE_REQUIREMENTS = ROOT / "docs" / "requirements.txt"
#: Packages of compilers, a third of all that is installed, which no check of sources looks into.
COMPILERS = ("nvidia-cuda-nvrtc", "triton")
#: What ``test`` compiles for, in a third of the time of sm90 and this. Tests compile a variant of each kernel for the others.
TESTED = "ptx80"


# --- The wheel --------------------------------------------------------------------------------


def for_tests() -> list[str]:
    """What the package's extra `test` asks for. Python 3.10 cannot read that; there, it is installed with the wheel."""
    if sys.version_info < (3, 11):
        return []
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"]["test"])


def upgrade_pip(environment: Environment) -> None:
    """Python brings a pip that takes twice as long to find what to install. It will do if there is no other, and if no uv."""
    both = environment.install("pip>=25", "uv", "--constraint", REQUIREMENTS)
    if run("upgrade pip, install uv", both):
        run("upgrade pip", environment.install("pip>=25"))


def install_packages(title: str, environment: Environment, *words: str | Path) -> None:
    """By uv or, where that cannot or fails, by pip."""
    command = uv.command(environment, *words)
    if command is None or run(f"{title} by uv", command):
        require(title, environment.install(*words))


def install_tools(environment: Environment) -> None:
    """Torch and the linters at their pinned versions, what builds the site, and what tests need, but for compilers."""
    lists = ["-r", CONSTRAINTS, "-r", SITE_REQUIREMENTS, "--constraint", REQUIREMENTS]
    packages = [package for package in for_tests() if not package.startswith(COMPILERS)]
    install_packages("install torch and the tools", environment, *lists, *packages)


def install_compilers(environment: Environment) -> None:
    """The rest: compilers, and what checks a release. What is there already stays, as checks of sources use it meanwhile."""
    lists = ["-r", REQUIREMENTS, "--constraint", CONSTRAINTS]
    packages = [package for package in for_tests() if package.startswith(COMPILERS)]
    install_packages("install compilers", environment, *lists, *packages)


def install(environment: Environment, wheel: Wheel, extra: str = "") -> None:
    """Exactly this wheel, where torch is at the pinned version.

    The version does not change from build to build, so an installed one is removed beforehand.
    The constraints hold for this environment only; the build's own has its pins in the backend.
    """
    packages = "lib/python3*/site-packages"
    if any(environment.folder.glob(f"{packages}/{PACKAGE}-*.dist-info")):
        remove = environment.pip("uninstall", "-q", "-y", DISTRIBUTION)
        require("remove the last build", remove)
    # pip leaves files in the package's folder that it did not install; the tests would use them.
    for left in environment.folder.glob(f"{packages}/{PACKAGE}"):
        shutil.rmtree(left)
    words = ("install", "-q", "--constraint", CONSTRAINTS, f"{wheel.path}{extra}")
    require("install the wheel", environment.pip(*words))
    # From a folder without the sources, as the tests are to see it.
    where = f"import {PACKAGE}, pathlib; print(pathlib.Path({PACKAGE}.__file__).parent)"
    result = subprocess.run(
        [environment.python, "-c", where],
        cwd=WORK,
        check=True,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
    )
    place = Path(result.stdout.strip())
    if not place.is_relative_to(environment.folder):
        raise DevError(
            f"{PACKAGE} is imported from {place}, not from the environment; is PYTHONPATH set?"
        )
    say(f"{PACKAGE} is imported from {place.relative_to(ROOT)}")


# --- The checks -------------------------------------------------------------------------------


def stage_sources() -> Path:
    """The sources laid out as they are installed, by links, so that what reads them sees the import names."""
    folder = WORK / "sources"
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
    return run("mypy", [*command, "-p", PACKAGE], cwd=stage_sources())


def check_imports(environment: Environment) -> int:
    """import-linter on the whole package, from the staging folder: which way imports run."""
    command = [environment.program("lint-imports"), "--no-cache", ROOT / "pyproject.toml"]
    return run("import contracts", command, cwd=stage_sources())


def build_site(environment: Environment) -> int:
    """The documentation, strictly: a link or an anchor that leads nowhere fails. It reads the sources only.

    Not quietly: what mkdocs does not print it does not count, and lets pass.
    """
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # the theme's advertisement
    stage_sources()  # where the settings of the site have them
    command = [environment.python, "-m", "mkdocs", "build", "--strict", "-f", SITE]
    return run("the documentation", command)


def report_attestations(environment: Environment) -> None:
    """Say how many binaries a GPU has tested; a gate for releases, which a change need not pass."""
    command = [environment.python, ROOT / "tools" / "attest.py", "--check"]
    say(f"\n=== attestations (for information)\n$ {' '.join(map(str, command))}")
    result = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        check=False,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
    )
    lines = result.stdout.splitlines()
    if len(lines) > 1:
        say(f"({len(lines) - 1} lines, one per binary, left out)")
    say(f"{lines[-1] if lines else 'it says nothing'} (exit {result.returncode})")


def pytest_arguments(arguments: Sequence[str], workers: int, thorough: bool) -> list[str]:
    """For the whole suite: up to eight workers, one per core, with work stealing. Given arguments are passed on unchanged."""
    chosen = list(arguments) or ["-n", str(min(workers, 8)), "--dist", "worksteal"]
    return ["--thorough", *chosen] if thorough else chosen


def check_sources(environment: Environment) -> list[str]:
    """Every check that reads the sources alone, whether or not an earlier one failed; the names of those that did."""
    ruff = environment.program("ruff")
    return [
        title
        for title, status in (
            ("ruff check", run("ruff check", [ruff, "check", "."])),
            ("ruff format", run("ruff format", [ruff, "format", "--check", "."])),
            ("mypy", check_types(environment)),
            ("import contracts", check_imports(environment)),
            ("the documentation", build_site(environment)),
        )
        if status
    ]


@contextmanager
def beside(command: Sequence[str | Path]) -> Iterator[Callable[[], int]]:
    """A program that runs meanwhile. The function waits for it, and returns its status; what it has printed is shown whole
    if it failed, and else the lines that end its steps."""
    log = WORK / "beside.log"
    say(f"\n=== beside what follows (all of it in {log.relative_to(ROOT)})")
    say(f"$ {' '.join(map(str, command))}")
    with (
        log.open("w", encoding="utf-8") as record,
        subprocess.Popen(list(map(str, command)), stdout=record, stderr=subprocess.STDOUT) as other,
    ):

        def end() -> int:
            status, text = other.wait(), log.read_text(encoding="utf-8")
            steps = (line for line in text.splitlines() if line.startswith("--- "))
            say(f"\n{text if status else chr(10).join(steps)}")
            return status

        yield end


def check_installed(environment: Environment, arguments: Sequence[str], thorough: bool) -> int:
    """The checks of what is installed; pytest's exit status.

    pytest is started as the environment's program, not by ``-m``, which would put this folder, and with it the sources, on
    its path.
    """
    report_attestations(environment)
    pytest = [environment.program("pytest"), *pytest_arguments(arguments, cores(), thorough)]
    say(f"\n=== pytest\n$ {' '.join(map(str, pytest))}")
    return subprocess.run(list(map(str, pytest)), cwd=ROOT, check=False).returncode


# --- The commands -----------------------------------------------------------------------------


def demo(fresh: bool, archs: str) -> None:
    check_machine()
    environment = make_environment(WORK / "venv", fresh)
    wheel = build_wheel(environment, WORK, archs=archs or archs_of_this_machine())
    require("install torch", environment.install("--constraint", CONSTRAINTS, "torch"))
    install(environment, wheel)
    program = environment.program(DISTRIBUTION)
    require("look inside", [program, "inspect"], cwd=WORK)
    require("self-test", [program, "selftest"], cwd=WORK)


def test(fresh: bool, archs: str, thorough: bool, arguments: Sequence[str]) -> int:
    check_machine()
    environment = make_environment(WORK / "venv", fresh)
    upgrade_pip(environment)  # before the build, which uses it
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(build_wheel, environment, WORK, archs=archs or TESTED)
        install_tools(environment)
        # What reads the sources alone need not wait for the wheel and what it needs, nor the wheel's tests for it.
        with beside([sys.executable, Path(__file__), "sources"]) as end:
            install_compilers(environment)
            install(environment, building.result(), extra="[test]")
            status = check_installed(environment, arguments, thorough)
            return 1 if end() or status else 0


def site() -> int:
    """The documentation alone, in an environment of its own."""
    check_machine()
    environment = make_environment(WORK / "site", fresh=False)
    command = environment.install("-r", SITE_REQUIREMENTS)
    require("install what builds the site", command)
    return build_site(environment)


def of_last_test() -> Environment:
    """The environment that the last test made."""
    environment = Environment(WORK / "venv")
    if not (environment.healthy() and environment.program("mypy").is_file()):
        raise DevError(
            "there is no environment with mypy yet; run `python3 tools/dev.py test` once, which makes it and runs mypy, too. "
            "`ruff check .` and `ruff format --check .` need none"
        )
    return environment


def types() -> int:
    """mypy alone: for the hook that runs before a commit."""
    return check_types(of_last_test())


def sources() -> int:
    """What reads the sources alone."""
    failed = check_sources(of_last_test())
    if failed:
        say(f"\nFAILED: {', '.join(failed)}")
    return 1 if failed else 0


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
        if name == "test":
            command.add_argument(
                "--thorough", action="store_true", help="every combination of parameters"
            )
        default = {"demo": "this machine's GPUs, or ptx80", "test": TESTED}[name]
        command.add_argument(
            "--archs",
            default="",
            metavar="sm80,sm90",
            help=f"the architectures to compile for, `all` for all; default: {default}",
        )
    commands.add_parser("sources", help="the checks that read the sources alone")
    commands.add_parser("types", help="mypy alone, in the environment that is there")
    commands.add_parser("site", help="the documentation, into build/site")
    options, rest = parser.parse_known_args()
    if rest and options.command != "test":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    WORK.mkdir(parents=True, exist_ok=True)
    # Tests start hundreds of processes that import torch: each would compile its modules for three seconds if none kept them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.monotonic()
    try:
        if alone := {"sources": sources, "types": types, "site": site}.get(options.command):
            return alone()
        if options.command == "test":
            return test(options.fresh, options.archs, options.thorough, rest)
        demo(options.fresh, options.archs)
        say(f"\ndemo done in {time.monotonic() - started:.0f} s")
        return 0
    except DevError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
