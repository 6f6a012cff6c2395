"""Run the tests of the public interface on the CPU with several releases of torch, and print which pass.

    python3 tools/torch_matrix.py                        the releases that ci/matrix.json names
    python3 tools/torch_matrix.py --torch 2.6 2.8        others
    python3 tools/torch_matrix.py --wheel dist/pypi/scan_registry-….whl
    python3 tools/torch_matrix.py --all                  every test of operators and layers, not the public ones alone

Each release has an environment of its own under build/torch, with the same wheel. Without ``--wheel``, the wheel is
built from this tree, without GPU binaries. pip's configuration says where pip looks for torch. On x86-64, PyPI's torch
is built for CUDA and takes gigabytes, so only CPU builds (``2.9.1+cpu``) are installed on x86-64. A release without a
build for this platform and Python is not run; with ``--strict`` that is a failure.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

# After everything that is installed: beside this folder lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from ci.matrix import load
from ci.workspace import (
    PACKAGE,
    ROOT,
    DevError,
    check_machine,
    make_environment,
    require,
    say,
)

WORK = ROOT / "build" / "torch"
TESTS = ROOT / "tests" / PACKAGE
PUBLIC = (TESTS / "test_public.py",)
ALL = (*PUBLIC, TESTS / "ops", TESTS / "nn")
#: What the tests need beside torch. numpy is optional for torch, and some tests use it.
NEEDED = ("pytest>=8", "pytest-xdist>=3", "hypothesis>=6.100", "jsonschema>=4.20", "numpy")


@dataclass(frozen=True)
class Row:
    """One release of torch: what was installed, and what pytest counted; or why nothing was run."""

    release: str
    torch: str | None = None
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0
    why: str | None = None

    @property
    def verdict(self) -> str:
        if self.why:
            return f"not run: {self.why}"
        return "FAILED" if self.failed or not self.passed else "passed"


def available(said: str) -> list[str]:
    """Versions, newest first, in what ``pip index versions`` prints."""
    found = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    return [version.strip() for version in found[1].split(",")] if found else []


def chosen(release: str, versions: Sequence[str], machine: str) -> str | None:
    """The newest version of the release to install on a machine; None on x86-64 if there is no CPU build."""
    pattern = re.compile(rf"{re.escape(release)}(\.\d+)*(\+\w+)?")
    matching = [version for version in versions if pattern.fullmatch(version)]
    on_cpu = [version for version in matching if version.endswith("+cpu")]
    return next(iter(on_cpu if machine == "x86_64" else on_cpu or matching), None)


def counts(report: str) -> tuple[int, int, int]:
    """Tests that passed, failed and were skipped, in pytest's XML."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    total, bad, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites for key in keys)
        for keys in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return total - bad - skipped, bad, skipped


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'torch':14} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}  verdict"]
    for row in rows:
        numbers = f"{row.passed:7} {row.failed:7} {row.skipped:8} {row.seconds:8.0f}"
        blank = f"{'–':>7} {'–':>7} {'–':>8} {'–':>8}"
        lines.append(
            f"{row.torch or row.release:14} {blank if row.why else numbers}  {row.verdict}"
        )
    return "\n".join(lines)


def run(release: str, wheel: Path, tests: Sequence[Path], words: Sequence[str]) -> Row:
    """Install one release of torch with the wheel in an environment of its own, and test."""
    environment = make_environment(WORK / release, fresh=False)
    listed = _said(environment.pip("index", "versions", "torch"))
    version = chosen(release, available(listed), platform.machine())
    if version is None:
        return Row(release, why="there is no CPU build of it for this Python where pip looks")
    say(f"\n=== torch {version}")
    for packages in ((f"torch=={version}", *NEEDED), ("--force-reinstall", "--no-deps", wheel), (wheel,)):  # fmt: skip
        command = environment.pip("install", "-q", *packages)
        if subprocess.run(list(map(str, command)), check=False).returncode:
            return Row(release, version, why="it does not install")
    report = WORK / f"{release}.xml"
    report.unlink(missing_ok=True)
    command = [environment.program("pytest"), "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    command += [f"--junitxml={report}", *words, *tests]
    started = time.monotonic()
    # From a folder without the sources: what is tested is the installed package.
    status = subprocess.run(list(map(str, command)), cwd=WORK, check=False).returncode
    seconds = time.monotonic() - started
    if not report.is_file():
        return Row(release, version, failed=1, seconds=seconds)
    passed, failed, skipped = counts(report.read_text(encoding="utf-8"))
    return Row(release, version, passed, failed or int(status != 0), skipped, seconds)


def _said(command: Sequence[str | Path]) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, encoding="utf-8", check=False
    )
    return done.stdout


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=load().torches, metavar="2.6")
    parser.add_argument("--wheel", type=Path, help="the wheel to test, for this platform")
    parser.add_argument("--all", action="store_true", help="every test of operators and layers")
    parser.add_argument("--strict", action="store_true", help="what is not run is a failure")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    parser.add_argument("rest", nargs="*", help="further arguments for pytest, after --")
    options = parser.parse_args(words)
    if options.wheel and not options.wheel.is_file():
        parser.error(f"argument --wheel: {options.wheel} is not a file")
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        wheel = options.wheel.resolve() if options.wheel else _wheel()
        tests = ALL if options.all else PUBLIC
        rows = [run(release, wheel, tests, options.rest) for release in options.torch]
    except DevError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    where = f"Python {platform.python_version()}, {platform.machine()}, {wheel.name}"
    say(f"\n{where}\n\n{table(rows)}")
    if options.json:
        document = {"where": where, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    bad = [row for row in rows if row.verdict == "FAILED" or (row.why and options.strict)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
