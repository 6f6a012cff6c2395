"""What the scripts of this repository share: running steps, a virtual environment, building the wheel.

Needs Python 3.10 or later and nothing else; the scripts install what they need into environments of
their own.
"""

from __future__ import annotations

import json
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
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
REQUIREMENTS = ROOT / "ci" / "requirements.txt"
PACKAGE = "scan_registry"
DISTRIBUTION = "scan-registry"

#: What the wheel has to hold for it to work, as endings of file names.
REQUIRED = (
    f"{PACKAGE}/hardware/_launcher.abi3.so",
    f"{PACKAGE}/hardware/_launcher.pyi",
    f"{PACKAGE}/ops/_cpu.abi3.so",
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

    def install(self, *words: str | Path) -> list[str | Path]:
        """The command that installs packages. Python compiles the modules that it imports, which are few of torch's and jax's:
        compiling all would take pip as long again."""
        return self.pip("install", "-q", "--no-compile", *words)

    @property
    def stamp(self) -> Path:
        return self.folder / "made-for"

    def identity(self) -> str:
        """What makes an environment of another day unusable: its place, and its Python."""
        return f"{self.folder}\n{sys.base_prefix}\n{sys.version}\n"

    def healthy(self) -> bool:
        if not self.stamp.is_file() or self.stamp.read_text(encoding="utf-8") != self.identity():
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


def archs_of_this_machine() -> str:
    """The archives that the GPUs of this machine need, as ``-C archs=…`` takes them.

    Asks nvidia-smi, since this Python has no torch. ``ptx80`` serves GPUs that have no archive of their own.
    Without a GPU it is also the answer: of all archives, it compiles in the least time.
    """
    released = json.loads((ROOT / "ci" / "matrix.json").read_text(encoding="utf-8"))["archs"]
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, check=False, capture_output=True, text=True, encoding="utf-8", timeout=30
        )
        capabilities = done.stdout.split() if done.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        capabilities = []
    own = (f"sm{capability.replace('.', '')}" for capability in capabilities)
    return ",".join(sorted({arch if arch in released else "ptx80" for arch in own})) or "ptx80"


def make_environment(folder: Path, fresh: bool) -> Environment:
    """The environment in a folder, made anew if asked for or if the one there does not work."""
    environment = Environment(folder)
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
    environment.stamp.write_text(environment.identity(), encoding="utf-8")
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
        named = (f"{name} {size / 1e6:.2f} MB" for name, size in self.archives.items())
        archives = ", ".join(named) or "none"
        return (
            f"{self.path.name}: {self.size / 1e6:.2f} MB\n"
            f"installs: {', '.join(self.top_level)}\n"
            f"archives: {archives}"
        )


def check_wheel(path: Path, archives: bool = True) -> Wheel:
    """Look into a wheel; ``DevError`` unless it installs the one package, complete, with ``archives``
    or without any.

    Files that a wheel puts elsewhere (its ``.data`` folder) count under the place they go to.
    """
    with zipfile.ZipFile(path) as wheel:
        if broken := wheel.testzip():
            raise DevError(f"{path.name}: {broken} is damaged")
        files = {entry.filename: entry.file_size for entry in wheel.infolist()}
    top_level = _top_level(files)
    if top_level != (PACKAGE,):
        raise DevError(
            f"{path.name} installs {', '.join(top_level) or 'nothing'}; it must be {PACKAGE} alone"
        )
    optional = () if archives else (".scanreg",)
    missing = [e for e in REQUIRED if e not in optional and not any(n.endswith(e) for n in files)]
    if missing:
        raise DevError(f"{path.name} has no file that ends in {' or '.join(missing)}")
    sizes = {Path(name).stem: files[name] for name in sorted(files) if name.endswith(".scanreg")}
    if sizes and not archives:
        raise DevError(f"{path.name} has archives, which were not asked for: {', '.join(sizes)}")
    return Wheel(path, path.stat().st_size, top_level, sizes)


def _top_level(files: Mapping[str, int]) -> tuple[str, ...]:
    folders = {name.split("/")[0] for name in files}
    return tuple(sorted(name for name in folders if not name.endswith(".dist-info")))


def build_wheel(
    environment: Environment,
    work: Path,
    source: Path = ROOT,
    *,
    archs: str = "all",
    isolated: bool = True,
    variables: Mapping[str, str] | None = None,
) -> Wheel:
    """Build the wheel as pip builds it for a user, by PEP 517, into ``work / "wheel"``.

    ``archs`` is what ``-C archs=…`` takes. A build that is not isolated uses the environment's compilers.
    ``variables`` are set in the build's environment.
    """
    folder, log = work / "wheel", work / "build.log"
    shutil.rmtree(folder, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    command = environment.pip("wheel", "-v", "--no-deps", "--config-settings", f"archs={archs}")
    command += [] if isolated else ["--no-build-isolation"]
    command += ["--wheel-dir", folder, source]
    say(f"\n=== build the wheel (all of it in {log.relative_to(ROOT)})")
    say(f"$ {' '.join(map(str, command))}")
    started = time.monotonic()
    with (
        log.open("w", encoding="utf-8") as record,
        subprocess.Popen(
            list(map(str, command)),
            cwd=work,
            # Of the packages that only the build needs, Python compiles the modules that it imports.
            env={**os.environ, "PIP_COMPILE": "0", **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            record.write(line)
            if line.strip().startswith("scan-registry:"):
                say(f"  {line.strip()}")
    if process.returncode:
        last = log.read_text(encoding="utf-8").rpartition("Running command ")[2]
        raise DevError(f"the wheel did not build (exit status {process.returncode}):\n{last}")
    (path,) = folder.glob("*.whl")
    say(f"--- build the wheel: {time.monotonic() - started:.1f} s")
    wheel = check_wheel(path, archs != "none")
    say(str(wheel))
    return wheel


def cores() -> int:
    return len(os.sched_getaffinity(0))
