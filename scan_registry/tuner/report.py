"""The results of tuning: how much slower the shipped choices are than the best, as text and as JSON."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from scan_registry.hardware.device import Device
from scan_registry.kernels.tables import Run, Table
from scan_registry.kernels.tuning import Tuning
from scan_registry.runtime import jit
from scan_registry.tuner.engine import Tuner, TuningResult
from scan_registry.version import __version__

#: What the driver's tool calls the clocks, in MHz: as they are, and at their most.
_CLOCKS = {
    "sm": "clocks.sm",
    "memory": "clocks.mem",
    "most_sm": "clocks.max.sm",
    "most_memory": "clocks.max.mem",
}


def run_here(ordinal: int, device: Device) -> Run:
    """Where and when this is: the GPU, and what the driver's tool tells of it, if it is installed."""
    info = _queried(ordinal, ["driver_version", *_CLOCKS.values()])
    clocks = {
        name: int(float(info[query])) for name, query in _CLOCKS.items() if _number(info.get(query))
    }
    compilers: dict[str, str] = {
        language: toolchain if isinstance(toolchain, str) else toolchain.identity
        for language, toolchain in jit.toolchains().items()
    }
    return Run(
        gpu=device.name,
        driver=info.get("driver_version", "for CUDA {}.{}".format(*device.driver)),
        clocks=clocks,
        toolchain=compilers,
        version=__version__,
        date=date.today().isoformat(),
    )


def _queried(ordinal: int, queries: Sequence[str]) -> dict[str, str]:
    """Answers of the driver's tool about a GPU; none where there is no such tool."""
    command = ["nvidia-smi", f"--id={ordinal}", f"--query-gpu={','.join(queries)}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    answers = [word.strip() for word in done.stdout.splitlines()[0].split(",")]
    return dict(zip(queries, answers, strict=False))


def _number(text: str | None) -> bool:
    try:
        return math.isfinite(float(text or ""))
    except ValueError:
        return False


@dataclass(frozen=True)
class Regret:
    """How much slower what would run untuned is than the best that was found, over ``problems``."""

    problems: int
    geometric_mean: float
    worst: float


def regret(tuned: Iterable[TuningResult]) -> Regret | None:
    """Over the problems on which what would run untuned was timed; None if there are none."""
    ratios = [result.regret for result in tuned if result.regret is not None]
    if not ratios:
        return None
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return Regret(len(ratios), mean, max(ratios))


def tunings(device: Device, tuned: Iterable[TuningResult]) -> dict[str, Tuning]:
    """What selection needs of it, by how the kernels' variants begin."""
    families: dict[str, Table] = {}
    for result in tuned:
        name = result.posed.family.name
        table = families.setdefault(name, Table(name, device.arch))
        families[name] = table.with_newer([result.measured])
    return {head: tuning for table in families.values() for head, tuning in table.tunings().items()}


def document(tuner: Tuner, saved: str | None) -> dict[str, Any]:
    """The stable form, as ``schemas/tune.json`` describes it: keys are only ever added."""
    total = regret(tuner.tuned)
    return {
        "device": tuner.device.name,
        "arch": tuner.device.arch,
        "run": asdict(tuner.run),
        "saved": saved,
        "problems": [_problem(result) for result in tuner.tuned],
        "regret": asdict(total) if total else None,
        "left_out": [f"{posed.kernel.head} {posed}" for posed in tuner.left_out],
        "refused": [
            {"variant": str(variant), "reason": reason} for variant, reason in tuner.refused.items()
        ],
    }


def _problem(result: TuningResult) -> dict[str, Any]:
    return {
        "kernel": result.posed.kernel.head,
        "problem": result.measured.problem,
        "kind": result.posed.shape.kind,
        "sizes": dict(result.posed.shape.sizes),
        "best": result.best,
        "best_ms": result.best_ms,
        "shipped": result.shipped,
        "shipped_ms": result.shipped_ms,
        "regret": result.regret,
        "timings": {label: timing._asdict() for label, timing in result.measured.timings.items()},
    }
