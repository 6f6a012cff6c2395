"""The rig for tests of the loader: what they ask of the stub driver, and of a provider of their own.

What is tested runs in processes of its own, without torch, since a process opens one driver and
keeps it. The archives come from a provider that is installed for these processes alone, and the
package's own are left out, so that it does not matter which of them were built.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scan_registry.artifact import archive
from scan_registry.artifact.archive import Binary
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.runtime import jit

Make = Callable[..., tuple[Binary, bytes]]
KERNEL = "time_last_forward"
CUDA = [v for v in FAMILY.kernel(KERNEL, "cuda").variants if v.text("dtype") == "float32"]
#: What is preferred for the scripts' problem, the next best, and what is compiled where nothing is there.
BEST = COMPILED = next(v for v in CUDA if "access=aligned,warps=1,rows=4,steps=1" in str(v))
SECOND = next(v for v in CUDA if "access=generic,warps=1,rows=4,steps=1" in str(v))
OUT_OF_MEMORY, NO_BINARY_FOR_GPU, LAUNCH_OUT_OF_RESOURCES = 2, 209, 701
needs_nvrtc = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)
#: What every script starts with.
RIG = '''
import ctypes, json, os, sys, threading, time, warnings
from scan_registry.catalog import providers

installed = providers.installed
providers.installed = lambda: (
    tuple(p for p in installed()[0] if p.name == "acme-kernels"), ()
)

from scan_registry.dispatch import policy
from scan_registry.hardware import driver
from scan_registry.runtime import jit, loader
from scan_registry.dispatch.fit import Tier
from scan_registry.kernels import tables
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY

tables.shipped = lambda *_: ()  # what is measured on some GPU is not what is tested here
warnings.simplefilter("always")
told = []
warnings.showwarning = lambda message, *_: told.append(f"{type(message).__name__}: {message}")


def prepare(ordinal=0, backend="auto", time=1024, lowest=Tier.REFERENCE):
    strides = (*(Strides(0, 3 * time, time, 1),) * 3, Strides(0, 3, 1, 0))
    dtypes, sizes = ("float32", "float32"), (1, 2, 3, time)
    problem = LinearScanProblem("forward", "time_last", *dtypes, *sizes, strides, 16)
    return loader.prepare(ordinal, FAMILY, problem, backend, lowest)


def facts(prepared):
    winner = prepared.decision.winner
    return {
        "tier": str(winner.tier),
        "variant": str(winner.variant),
        "target": str(winner.target),
        "launches": prepared.launch is not None,
        "rejected": {r.subject: r.reason for r in prepared.decision.rejected},
    }


def attempt(action, *arguments, **keywords):
    """What came of it: the facts of what was prepared, or the error."""
    try:
        return facts(action(*arguments, **keywords))
    except Exception as error:
        return {"error": type(error).__name__, "words": str(error)}


def run(prepared):
    return prepared.launch.run(0, *range(4096, 4096 + 7))


def mapped(name):
    """Whether a library is loaded in this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return name in maps.read()


def report(**values):
    print(json.dumps({**values, "told": told}))
'''


@dataclass
class Rig:
    """The stub driver, and a provider called acme-kernels whose archives it gets to see."""

    stub: Any
    package: Path

    def holds(self, arch: str, *binaries: tuple[Binary, bytes]) -> Path:
        target = Target.parse(arch)
        path = self.package / "archives" / f"{target.label}{archive.SUFFIX}"
        archive.write(path, target, binaries, {"version": "1.0"})
        return path

    def denies(self, *entries: Mapping[str, str]) -> None:
        manifest = {"schema": 1, "core": ">=0", "denied": list(entries)}
        (self.package / "provider.json").write_text(json.dumps(manifest), encoding="utf-8")

    def run(self, script: str, **variables: str) -> dict[str, Any]:
        """What the script reports, run with nothing cached."""
        cache = {"SCAN_REGISTRY_CACHE": str(self.stub.folder / "cache"), **variables}
        lines = script.strip().splitlines()
        text = "\n".join(["from rig import *", *lines])
        result: dict[str, Any] = json.loads(self.stub.run(text, **cache).stdout.splitlines()[-1])
        return result

    def loads(self) -> list[tuple[int | None, str, int]]:
        """Device, target and status of each module load that the driver saw."""
        calls = self.stub.calls("cuModuleLoadData")
        return [(call.device, call.image, call.status) for call in calls]


Synthetic = Callable[..., tuple[Binary, bytes]]
