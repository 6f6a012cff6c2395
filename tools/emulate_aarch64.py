"""Try the wheel for aarch64 on a machine of another kind, by emulation: qemu runs Debian's Python and torch.

    python3 tools/emulate_aarch64.py [WHEEL] [--only NAME …] [--fresh]

Without WHEEL, the wheel for aarch64 in dist/pypi is tested. Needs apt-get of Debian 12 or later or of
Ubuntu, and the package qemu-user-static; also gcc-aarch64-linux-gnu and libc6-dev-arm64-cross, which
compile the stub driver. Needs no root, binfmt_misc or container. All files are under build/aarch64. A run
takes tens of minutes, as emulated code is slow, and says nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# After everything that is installed: beside this folder lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from ci.workspace import PACKAGE, ROOT, DevError, Environment, make_environment, require, run, say

WORK = ROOT / "build" / "aarch64"
EMULATOR = "qemu-aarch64-static"
COMPILER = "aarch64-linux-gnu-gcc"
#: What Grace, Thor and Orin have at least: Armv8.2 with NEON and no SVE, which qemu would run far slower.
PROCESSOR = "neoverse-n1"
#: The newest whose wheel for aarch64 on PyPI is for CPUs alone, 146 MB; later ones bring CUDA's libraries.
TORCH = "torch==2.10.0"
#: What torch, the package and its tests need. torch is installed without its dependencies, which pip would
#: choose for this machine.
LIGHT = (
    *("filelock", "fsspec", "jinja2", "networkx", "sympy>=1.13.3", "typing-extensions"),
    *("hypothesis", "numpy", "packaging", "pytest", "rich", "setuptools>=77"),
)
NVRTC = "nvidia-cuda-nvrtc-cu12==12.9.86"
DEBIAN = ("python3", "libstdc++6", "libgomp1")

TESTS = ROOT / "tests" / PACKAGE
#: By name: the arguments of Python, and the exit statuses that are right. ``doctor`` exits with 1 if it has
#: advice.
RUNS: Mapping[str, tuple[tuple[str | Path, ...], tuple[int, ...]]] = {
    "import": (("-c", f"import {PACKAGE}, platform; print(platform.machine())"), (0,)),
    "inspect": (("-m", PACKAGE, "inspect"), (0,)),
    "doctor": (("-m", PACKAGE, "doctor", "--for", "sm_121"), (0, 1)),
    "selftest": (("-m", PACKAGE, "selftest", "--device", "cpu"), (0,)),
    "driver": ((TESTS / "hardware" / "test_driver.py",), (0,)),
    "loader": ((TESTS / "runtime" / "loader",), (0,)),
    "kernels": ((TESTS / "ops" / "cpu" / "test_right.py",), (0,)),
    "scans": (
        tuple(
            TESTS / "ops" / f"test_{name}_cpu.py"
            for name in ("linear_scan", "selective_scan", "causal_conv1d")
        ),
        (0,),
    ),
    "networks": (
        (
            *(TESTS / "ops" / f"test_{name}.py" for name in ("rnn", "rnn_cpu")),
            TESTS / "nn" / "test_modules.py",
        ),
        (0,),
    ),
}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "-m", "not gpu")


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool
    seconds: float
    last: str

    def __str__(self) -> str:
        word = "passed" if self.passed else "FAILED"
        return f"{word}  {self.seconds:6.0f} s  {self.name:9} {self.last}"


# --- The emulated machine ---------------------------------------------------------------------


def debian(folder: Path) -> Path:
    """Debian's Python for arm64 and the libraries it needs, unpacked and not installed: apt-get has an arm64
    state of its own here, so this machine's packages stay as they are."""
    state, root = folder / "apt", folder / "root"
    for place in (state / "lists" / "partial", state / "archives" / "partial", root):
        place.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Debug::NoLocking": "1",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    require("list Debian's packages for arm64", [*apt, "update"])
    options = ("install", "--yes", "--no-install-recommends", "--download-only")
    require("fetch Python for arm64", [*apt, *options, *DEBIAN])
    for package in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, root], check=True)
    return root


def python_in(folder: Path, root: Path) -> Path:
    """An environment of the emulated Python. Its ``python`` is a script that starts the emulator. Python
    takes the script for its own executable, so that subprocesses start it, too."""
    real = (root / "usr" / "bin" / "python3").resolve()
    place = folder / "venv"
    (place / "bin").mkdir(parents=True, exist_ok=True)
    settings = f"home = {real.parent}\ninclude-system-site-packages = false\n"
    (place / "pyvenv.cfg").write_text(settings, encoding="utf-8")
    python = place / "bin" / "python"
    emulated = shlex.join([EMULATOR, "-cpu", PROCESSOR, "-L", str(root), "-0"])
    text = f'#!/bin/sh\nexec {emulated} {shlex.quote(str(python))} {shlex.quote(str(real))} "$@"\n'
    python.write_text(text, encoding="utf-8")
    python.chmod(0o755)
    return python


def packages(tools: Environment, root: Path) -> Path:
    """Install all packages but this project's with this machine's pip, and return their folder."""
    version = (root / "usr" / "bin" / "python3").resolve().name.removeprefix("python")
    place = WORK / "venv" / "lib" / f"python{version}" / "site-packages"
    place.mkdir(parents=True, exist_ok=True)
    for needed in ((TORCH, "--no-deps"), (NVRTC, "--no-deps"), LIGHT):
        title = f"install {needed[0]}"
        require(title, tools.pip("install", "-q", *_foreign(place, version), *needed))
    return place


def _foreign(place: Path, version: str) -> list[str | Path]:
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 35)] + [
        "manylinux2014_aarch64"
    ]
    words: list[str | Path] = ["--target", place, "--upgrade", "--only-binary", ":all:"]
    words += ["--implementation", "cp", "--python-version", version]
    return words + [word for each in platforms for word in ("--platform", each)]


def check_tools() -> None:
    for program, package in (
        (EMULATOR, "qemu-user-static"),
        (COMPILER, "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
        ("apt-get", "apt"),
        ("dpkg", "dpkg"),
    ):
        if shutil.which(program) is None:
            raise DevError(
                f"{program} is not installed; on Debian and Ubuntu: apt-get install {package}"
            )


# --- What it runs -----------------------------------------------------------------------------


def attempt(python: Path, name: str) -> Outcome:
    """Run one of RUNS in a folder away from the sources, and write its output into a file."""
    words, right = RUNS[name]
    if isinstance(words[0], Path):
        words = (*PYTEST, *words)
    log, away = WORK / f"{name}.log", WORK / "away"
    away.mkdir(exist_ok=True)
    variables = {
        "CC": COMPILER,
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(away / "cache"),
    }
    say(f"{name}: in {log.relative_to(ROOT)}")
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as record:
        status = subprocess.run(
            [str(python), *map(str, words)],
            cwd=away,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=record,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    outcome = Outcome(name, status in right, time.monotonic() - started, last_line(log))
    say(str(outcome))
    return outcome


def last_line(log: Path) -> str:
    """The last line of a run's output, without the = signs that pytest puts around it."""
    lines = [line.strip("= ") for line in log.read_text(encoding="utf-8").splitlines()]
    return re.sub(r" in [\d.]+s.*", "", next((line for line in reversed(lines) if line), ""))


def try_wheel(wheel: Path, names: Sequence[str], fresh: bool) -> list[Outcome]:
    check_tools()
    if fresh:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    tools = make_environment(WORK / "tools", fresh)
    made = WORK / "made-for"
    root = WORK / "root"
    wanted = f"{DEBIAN} {TORCH} {NVRTC} {LIGHT}\n"
    if not made.is_file() or made.read_text(encoding="utf-8") != wanted:
        packages(tools, debian(WORK))
        made.write_text(wanted, encoding="utf-8")
    python = python_in(WORK, root)
    (place,) = (WORK / "venv" / "lib").glob("python*/site-packages")
    for old in place.glob(f"{PACKAGE}*"):
        shutil.rmtree(old)
    version = place.parent.name.removeprefix("python")
    command = tools.pip("install", "-q", *_foreign(place, version), "--no-deps", wheel)
    require(f"install {wheel.name}", command)
    run("who runs", [python, "-c", "import sys, torch; print(sys.version, torch.__version__)"])
    return [attempt(python, name) for name in names]


def wheel_in(dist: Path) -> Path:
    found = sorted((dist / "pypi").glob(f"{PACKAGE}-*_aarch64.whl"))
    if len(found) != 1:
        raise DevError(
            f"{dist} has not one wheel for aarch64; `python3 ci/build.py --all` makes it"
        )
    return found[0]


def checked(wheel: Path) -> Path:
    """The wheel's whole path, if it is a file and for aarch64: everything else takes minutes to fail."""
    if not wheel.is_file():
        raise DevError(f"{wheel} is not a file")
    if not wheel.name.endswith("_aarch64.whl"):
        raise DevError(f"{wheel.name} is not a wheel for aarch64")
    return wheel.resolve()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, nargs="?", metavar="WHEEL")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="NAME")
    parser.add_argument("--fresh", action="store_true", help="fetch everything anew")
    options = parser.parse_args(argv)
    try:
        wheel = checked(options.wheel or wheel_in(ROOT / "dist"))
        outcomes = try_wheel(wheel, options.only, options.fresh)
    except DevError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    say("\n" + "\n".join(map(str, outcomes)))
    failed = sum(not each.passed for each in outcomes)
    say(f"{len(outcomes) - failed} passed, {failed} failed, by emulation of {PROCESSOR}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
