"""Try the wheel for aarch64 on a machine of another kind, by emulation: qemu runs Debian's Python and torch.

    python3 tests/stress/aarch64.py [WHEEL] [--only NAME …] [--fresh]

Without WHEEL, the wheel for aarch64 in dist/pypi is tested. Needs apt-get of Debian 12 or later or of
Ubuntu, and the package qemu-user-static; also gcc-aarch64-linux-gnu and libc6-dev-arm64-cross, which
compile the stub driver. Needs no root, binfmt_misc or container. All files are under build/aarch64. A run
takes tens of minutes, as emulated code is slow, and says nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# After everything that is installed: in the repository lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from ci.workspace import PACKAGE, ROOT, DevError, Environment, make_environment, require, run, say

WORK = ROOT / "build" / "aarch64"
EMULATOR, COMPILER = "qemu-aarch64-static", "aarch64-linux-gnu-gcc"
#: By program: the packages to install.
NEEDED = {
    EMULATOR: "qemu-user-static",
    COMPILER: "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "apt-get": "apt",
    "dpkg": "dpkg",
}
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
#: By name: arguments of Python, or paths for pytest. ``doctor`` exits with 1 if it has advice.
RUNS: Mapping[str, tuple[str | Path, ...]] = {
    "import": ("-c", f"import {PACKAGE}, platform; print(platform.machine())"),
    "inspect": ("-m", PACKAGE, "inspect"),
    "doctor": ("-m", PACKAGE, "doctor", "--for", "sm_121"),
    "selftest": ("-m", PACKAGE, "selftest", "--device", "cpu"),
    "driver": (TESTS / "hardware" / "test_driver.py",),
    "loader": (TESTS / "runtime" / "loader",),
    "kernels": (TESTS / "ops" / "cpu" / "test_right.py",),
    "operators": tuple(sorted((ROOT / "tests" / "kernels").glob("*/op/test_cpu.py"))),
    "networks": (
        ROOT / "tests" / "kernels" / "rnn" / "op" / "test_rnn.py",
        TESTS / "nn" / "test_modules.py",
    ),
}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "-m", "not gpu")


# --- The emulated machine ---------------------------------------------------------------------


def debian(folder: Path) -> None:
    """Unpack, and do not install, Debian's Python for arm64 and the libraries it needs: apt-get has an arm64
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


def python_in(folder: Path) -> tuple[Path, str]:
    """An environment of the emulated Python, and its version. Its ``python`` is a script that starts the emulator.
    Python takes the script for its own executable, so that subprocesses start it, too."""
    root, place = folder / "root", folder / "venv"
    real = (root / "usr" / "bin" / "python3").resolve()
    (place / "bin").mkdir(parents=True, exist_ok=True)
    settings = f"home = {real.parent}\ninclude-system-site-packages = false\n"
    (place / "pyvenv.cfg").write_text(settings, encoding="utf-8")
    python = place / "bin" / "python"
    emulated = shlex.join([EMULATOR, "-cpu", PROCESSOR, "-L", str(root), "-0"])
    text = f'#!/bin/sh\nexec {emulated} {shlex.quote(str(python))} {shlex.quote(str(real))} "$@"\n'
    python.write_text(text, encoding="utf-8")
    python.chmod(0o755)
    return python, real.name.removeprefix("python")


def install(tools: Environment, version: str, *packages: str | Path) -> None:
    """Install packages for the emulated Python with this machine's pip."""
    place = WORK / "venv" / "lib" / f"python{version}" / "site-packages"
    place.mkdir(parents=True, exist_ok=True)
    words: list[str | Path] = ["--target", place, "--upgrade", "--only-binary", ":all:"]
    words += ["--implementation", "cp", "--python-version", version]
    for platform in ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 35))):
        words += ["--platform", f"{platform}_aarch64"]
    require(f"install {packages[0]}", tools.pip("install", "-q", *words, *packages))


# --- What it runs -----------------------------------------------------------------------------


def attempt(python: Path, name: str) -> bool:
    """Run one of RUNS in a folder away from the sources, with its output in a file; whether it passed."""
    words = RUNS[name]
    if isinstance(words[0], Path):
        words = (*PYTEST, *words)
    log, away = WORK / f"{name}.log", WORK / "away"
    away.mkdir(exist_ok=True)
    cache = str(away / "cache")
    variables = {"CC": COMPILER, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": cache}
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
    passed = status == 0 or (name, status) == ("doctor", 1)
    lines = log.read_text(encoding="utf-8").split("\n")
    last = next((line for line in reversed(lines) if line), "").strip("= ")
    verdict = "passed" if passed else "FAILED"
    say(f"{verdict}  {time.monotonic() - started:6.0f} s  {name:9} {last}")
    return passed


def try_wheel(wheel: Path, names: Sequence[str], fresh: bool) -> list[bool]:
    for program, package in NEEDED.items():
        if shutil.which(program) is None:
            raise DevError(f"{program} is missing; on Debian and Ubuntu: apt-get install {package}")
    if fresh:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    tools = make_environment(WORK / "tools", fresh)
    state, wanted = WORK / "installed", f"{DEBIAN} {TORCH} {NVRTC} {LIGHT}\n"
    complete = state.is_file() and state.read_text(encoding="utf-8") == wanted
    if not complete:
        debian(WORK)
    python, version = python_in(WORK)
    if not complete:
        for packages in ((TORCH, "--no-deps"), (NVRTC, "--no-deps"), LIGHT):
            install(tools, version, *packages)
        state.write_text(wanted, encoding="utf-8")
    for old in (WORK / "venv" / "lib").glob(f"python*/site-packages/{PACKAGE}*"):
        shutil.rmtree(old)
    install(tools, version, wheel, "--no-deps")
    run("who runs", [python, "-c", "import sys, torch; print(sys.version, torch.__version__)"])
    return [attempt(python, name) for name in names]


def chosen(wheel: Path | None) -> Path:
    """A wheel for aarch64, the one in dist/pypi by default: everything else takes minutes to fail."""
    folder = ROOT / "dist" / "pypi"
    wheels = [wheel] if wheel else sorted(folder.glob(f"{PACKAGE}-*_aarch64.whl"))
    if len(wheels) != 1:
        raise DevError(
            f"{folder} has not one wheel for aarch64; `python3 ci/build.py --all` makes it"
        )
    if not (wheels[0].is_file() and wheels[0].name.endswith("_aarch64.whl")):
        raise DevError(f"{wheels[0]} is no file with a wheel for aarch64")
    return wheels[0].resolve()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, nargs="?", metavar="WHEEL")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="NAME")
    parser.add_argument("--fresh", action="store_true", help="fetch everything anew")
    options = parser.parse_args(argv)
    try:
        passed = try_wheel(chosen(options.wheel), options.only, options.fresh)
    except DevError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    say(f"{sum(passed)} of {len(passed)} passed, by emulation of {PROCESSOR}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
