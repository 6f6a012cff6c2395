"""Try the packages as users install them: fresh environments, one for each way, from files alone.

    python3 ci/environments.py [--torch VERSION | --without-torch] [--dist FOLDER]

For the Python that runs it. Only what is not ours, such as torch, is fetched, before anything is
installed; without torch, everything is tried that does not compute.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# After everything that is installed: beside this folder lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from ci.matrix import load
from ci.workspace import DISTRIBUTION, PACKAGE, ROOT, DevError, Environment, make_environment, say

LIGHT = ("packaging>=24", "rich>=13")  # what the package needs beside torch

#: A provider of a version that there is not yet, made with the package's own code.
ANOTHER = """
import sys
from pathlib import Path
from scan_registry.artifact.archive import Archive
from scan_registry.catalog.inventory import catalogue
from scan_registry.packaging.package import Package
from scan_registry.hardware.target import Target
path = next(a.path for a in catalogue().archives if a.arch == Target.parse("sm90"))
package = Package("sm90", "900.0", "900.0", {Target.parse("sm90"): path.read_bytes()})
print(package.wheel().write(Path(sys.argv[1])))
"""
#: A call, its gradients, and the same compiled as one graph, which differs most from torch to torch.
SCAN = """
import torch, scan_registry
from scan_registry import nn
def scan(gates, tokens, start):
    return scan_registry.linear_scan(gates.sigmoid(), tokens, start)
gates, tokens = (torch.rand(2, 3, 50, requires_grad=True) for _ in range(2))
start = torch.rand(2, 3)
states = scan(gates, tokens, start)
assert states.shape == tokens.shape and bool(states.isfinite().all())
states.sum().backward()
assert bool(gates.grad.isfinite().all())
for dynamic in (False, True):
    compiled = torch.compile(scan, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert bool((compiled(gates, tokens, start) - states).abs().max() < 1e-6)
outputs, _ = nn.LSTM(32, 32)(torch.rand(5, 2, 32))
assert outputs.shape == (5, 2, 32)
"""


@dataclass(frozen=True)
class Try:
    """A fresh environment, and where its packages come from."""

    environment: Environment
    dist: Path
    house: Path
    torch: bool

    def install(self, folder: str, *requirements: str | Path, dependencies: bool = True) -> None:
        """From files alone; ``DevError`` with pip's words if they do not install."""
        command = self.environment.pip("install", "-q", "--no-index", "--find-links", self.house)
        command += ["--find-links", self.dist / folder]
        if not (dependencies and self.torch):
            command.append("--no-deps")
            needed = ("--no-index", "--find-links", self.house, *LIGHT)
            self._done(self.environment.pip("install", "-q", *needed))
        self._done([*command, *requirements])

    def _done(self, command: Sequence[str | Path]) -> None:
        result = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, encoding="utf-8", check=False
        )
        if result.returncode:
            raise DevError(result.stdout + result.stderr)

    def run(self, *words: str | Path, status: int | None = 0) -> str:
        """What the program says in a folder of its own; ``DevError`` if it ends otherwise. None stands
        for any status, as doctor's depends on the compilers that are here."""
        return self._ran([self.environment.program(DISTRIBUTION), *words], status)

    def python(self, script: str, *words: str | Path) -> str:
        return self._ran([self.environment.python, "-c", script, *words], 0)

    def _ran(self, command: Sequence[str | Path], status: int | None) -> str:
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run(
                list(map(str, command)),
                cwd=folder,
                env={**os.environ, "SCAN_REGISTRY_CACHE": str(Path(folder, "cache"))},
                capture_output=True,
                text=True,
                encoding="utf-8",
                check=False,
            )
        said = result.stdout + result.stderr
        if status is not None and result.returncode != status:
            raise DevError(f"{command[0]} {command[1]}: {result.returncode}, not {status}:\n{said}")
        return said

    def archives(self) -> dict[str, str]:
        """The provider of each architecture's archive."""
        listed = json.loads(self.run("inspect", "--json"))["archives"]
        return {archive["arch"]: archive["provider"] for archive in listed}


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise DevError(what)


def expect_machine_code(there: Try) -> None:
    """With an archive for it, an H100 gets machine code for every kernel and dtype but ``gated_scan`` in float16. Wheels
    leave that out, and no compiler is installed here that could make it."""
    words = ("doctor", "--for", "sm_90", "--driver", "575", "--json")
    (gpu,) = json.loads(there.run(*words))["gpus"]
    below = {
        (answer["family"], answer["dtype"])
        for answer in gpu["answers"]
        if answer["tiers"]["auto"] != "exact"
    }
    expect(below <= {("gated_scan", "float16")}, f"no machine code for {sorted(below)}")
    expect(len(gpu["answers"]) > len(below), "doctor says nothing of any kernel")


# --- The ways ---------------------------------------------------------------------------------


def fat(there: Try) -> None:
    """The default: every archive, nothing to compile."""
    there.install("pypi", DISTRIBUTION)
    expect(len(there.archives()) == len(load().archs), f"archives: {there.archives()}")
    there.run("verify")
    expect_machine_code(there)
    if there.torch:
        there.python(SCAN)
        there.run("selftest", "--device", "cpu")


def core_and_provider(there: Try) -> None:
    """The package without archives, and one architecture's."""
    there.install("index", f"{DISTRIBUTION}=={version(there)}+core", f"{DISTRIBUTION}-sm90")
    expect(there.archives() == {"sm_90": f"{DISTRIBUTION}-sm90"}, f"archives: {there.archives()}")
    there.run("verify")
    expect_machine_code(there)


def core_alone(there: Try) -> None:
    """No archive at all: the CPU computes, and doctor says what to install."""
    there.install("index", f"{DISTRIBUTION}=={version(there)}+core")
    expect(there.archives() == {}, f"archives: {there.archives()}")
    expect(
        "holds no archives" in there.run("inspect"), "inspect does not say that there is nothing"
    )
    report = json.loads(there.run("doctor", "--for", "sm_90", "--json", status=None))
    advice = [remedy for finding in report["findings"] for remedy in finding["remedies"]]
    expect("`pip install scan-registry-sm90`" in advice, f"doctor advises {advice}")
    if there.torch:
        there.python(SCAN)


def another_version(there: Try) -> None:
    """A provider that does not go with the core is one clear error."""
    there.install("pypi", DISTRIBUTION)
    with tempfile.TemporaryDirectory() as folder:
        wheel = there.python(ANOTHER, folder).strip()
        there.install("pypi", wheel, dependencies=False)
    said = there.run("inspect", status=2)
    expect(said.count("\n") == 1, said)
    for word in ("scan-registry-sm90 900.0", f"scan-registry {version(there)}", "pip install"):
        expect(word in said, said)


def version(there: Try) -> str:
    """Of the packages in the folder."""
    (path,) = (there.dist / "pypi").glob(f"{PACKAGE}_sm90-*.whl")
    return path.name.split("-")[1]


WAYS: tuple[Callable[[Try], None], ...] = (fat, core_and_provider, core_alone, another_version)


def fetch(environment: Environment, house: Path, torch: str | None) -> None:
    """Everything that is not ours, as files."""
    wanted = [*LIGHT, *([f"torch=={torch}.*"] if torch else [])]
    command = environment.pip("download", "-q", "--dest", house, *wanted)
    result = subprocess.run(list(map(str, command)), check=False)
    if result.returncode:
        raise DevError(f"pip cannot fetch {', '.join(wanted)} for this Python")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--torch", default=load().torch[1], help="such as 2.6; default: the newest")
    which.add_argument("--without-torch", action="store_true")
    options = parser.parse_args()
    torch = None if options.without_torch else options.torch
    work = ROOT / "build" / "ci" / "environments"
    failed = 0
    try:
        first = make_environment(work / "fetch", fresh=True)
        shutil.rmtree(work / "house", ignore_errors=True)
        fetch(first, work / "house", torch)
        for way in WAYS:
            environment = make_environment(work / way.__name__, fresh=True)
            try:
                way(Try(environment, options.dist.resolve(), work / "house", torch is not None))
            except DevError as error:
                failed += 1
                say(f"FAILED  {way.__name__}: {error}")
            else:
                say(f"passed  {way.__name__}: {(way.__doc__ or '').strip()}")
    except DevError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with_torch = f"torch {torch}" if torch else "without torch"
    say(
        f"Python {sys.version.split()[0]}, {with_torch}: {len(WAYS) - failed} of {len(WAYS)} passed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
