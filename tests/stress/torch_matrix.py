"""Run the tests of the public interface on the CPU with several releases of torch, and print which pass.

    python3 tests/stress/torch_matrix.py                        the releases that ci/matrix.json names
    python3 tests/stress/torch_matrix.py --torch 2.6 2.8        others
    python3 tests/stress/torch_matrix.py --wheel dist/pypi/scan_registry-….whl
    python3 tests/stress/torch_matrix.py --all                  every test of operators and layers, not the public ones alone

Each release has an environment of its own under build/torch, with the same wheel. Without ``--wheel``, the wheel is
built from this tree, without GPU binaries. pip's configuration says where pip looks for torch. On x86-64, PyPI's torch
is built for CUDA and takes gigabytes, so only CPU builds (``2.9.1+cpu``) are installed on x86-64. A release without a
build for this platform and Python is not run; with ``--strict`` that is a failure.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# After everything that is installed: in the repository lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from ci.matrix import load
from ci.workspace import PACKAGE, ROOT, DevError, check_machine, make_environment, require, say

WORK = ROOT / "build" / "torch"
TESTS = ROOT / "tests" / PACKAGE
PUBLIC = (TESTS / "test_public.py",)
ALL = (*PUBLIC, TESTS / "ops", TESTS / "nn")
#: What the tests need beside torch. numpy is optional for torch, and some tests use it.
NEEDED = ("pytest>=8", "pytest-xdist>=3", "hypothesis>=6.100", "jsonschema>=4.20", "numpy")
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


def available(said: str) -> list[str]:
    """Versions, newest first, in what ``pip index versions`` prints."""
    line = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    return [version.strip() for version in line[1].split(",")] if line else []


def chosen(release: str, versions: Sequence[str], machine: str) -> str | None:
    """The newest version of the release to install on a machine; None on x86-64 if there is no CPU build."""
    pattern = re.compile(rf"{re.escape(release)}(\.\d+)*(\+\w+)?")
    matching = [version for version in versions if pattern.fullmatch(version)]
    on_cpu = [version for version in matching if version.endswith("+cpu")]
    return next(iter(on_cpu if machine == "x86_64" else on_cpu or matching), None)


def run(release: str, wheel: Path, tests: Sequence[Path], words: Sequence[str]) -> tuple[str, str]:
    """Install one release of torch with the wheel in an environment of its own, and test: a verdict, and why."""
    environment = make_environment(WORK / release, fresh=False)
    said = subprocess.run(
        [*map(str, environment.pip("index", "versions", "torch"))],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    ).stdout
    version = chosen(release, available(said), platform.machine())
    if version is None:
        return NOT_RUN, "there is no CPU build of it for this Python where pip looks"
    say(f"\n=== torch {version}")
    for packages in (
        (f"torch=={version}", *NEEDED),
        ("--force-reinstall", "--no-deps", wheel),
        (wheel,),
    ):
        command = environment.pip("install", "-q", *packages)
        if subprocess.run([*map(str, command)], check=False).returncode:
            return NOT_RUN, f"{version} does not install"
    command = [
        environment.program("pytest"),
        "-q",
        "--thorough",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
    ]
    # From a folder without the sources: what is tested is the installed package.
    status = subprocess.run([*map(str, [*command, *words, *tests])], cwd=WORK, check=False)
    return (FAILED if status.returncode else PASSED), version


def _wheel() -> Path:
    """This tree's wheel, without archives, as pip builds it for a user."""
    check_machine()
    folder = WORK / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    environment = make_environment(WORK / "build", fresh=False)
    command = environment.pip("wheel", "-q", "--no-deps", "--config-settings", "archs=none")
    require("build the wheel", [*command, "--wheel-dir", folder, ROOT], cwd=WORK)
    (path,) = folder.glob("*.whl")
    return path


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=load().torches, metavar="2.6")
    parser.add_argument("--wheel", type=Path, help="the wheel to test, for this platform")
    parser.add_argument("--all", action="store_true", help="every test of operators and layers")
    parser.add_argument("--strict", action="store_true", help="what is not run is a failure")
    parser.add_argument("rest", nargs="*", help="further arguments for pytest, after --")
    options = parser.parse_args(words)
    if options.wheel and not options.wheel.is_file():
        parser.error(f"argument --wheel: {options.wheel} is not a file")
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        wheel = options.wheel.resolve() if options.wheel else _wheel()
        tests = ALL if options.all else PUBLIC
        rows = [(name, *run(name, wheel, tests, options.rest)) for name in options.torch]
    except DevError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(f"\nPython {platform.python_version()}, {platform.machine()}, {wheel.name}")
    for release, verdict, why in rows:
        say(f"torch {release:8} {verdict}: {why}")
    bad = (FAILED, NOT_RUN) if options.strict else (FAILED,)
    return 1 if any(verdict in bad for _, verdict, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
