"""Fit the timing models of linear_scan's kernels to the tuning tables, and time random scans for that.

    python tools/timing_model.py                            write kernels/linear_scan/tuning/models/; seconds
    python tools/timing_model.py --random 60 --seed 7       on a GPU: time every installed variant on as many random scans

Fit them whenever a table has changed, in a checkout installed by ``pip install -e . -C archs=none``. It needs numpy. Times of
random scans, which ``scan-registry bench --random`` draws, go into a file beside the models, and fits use them from then on.

Of each kernel and design the coefficients are those with the least squares of the logarithms of predicted over measured
times, of all GPUs of an architecture together. A variant counts the less the slower it is than the fastest on its problem,
and an outlier hardly more than what is 15% off.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from records import write_records
from tune import installed

from scan_registry.cli.errors import UsageError
from scan_registry.cli.tune import tuner_for, watched
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.op.random_cases import draw
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.linear_scan.timing_model import (
    COEFFICIENTS,
    Work,
    geometry,
    milliseconds,
    work_of,
)
from scan_registry.kernels.model import Kernel
from scan_registry.kernels.tables import FOLDER, models_file, timed
from scan_registry.kernels.tuning import Model, Row, Tuning
from scan_registry.tuner.engine import TuningResult
from scan_registry.tuner.problems import posed

#: The sources: what is installed may have no tables.
SOURCES = Path(__file__).resolve().parents[1] / "kernels" / FAMILY.name
ARCH = "sm_90"
#: SMs, and what they stream from and to DRAM in bytes per ms, of those with tables.
GPUS: Model = {
    "NVIDIA H200": {"sm_count": 132, "bandwidth": 4.38e9},
    "NVIDIA H100 80GB HBM3": {"sm_count": 132, "bandwidth": 3.0e9},
}
#: Where a fit starts, and the limits of what it may find.
START = (2e-3, 1.0, 0.1, 1e-7, 1e-7, 1e-6, 1e-6, 8e-4, 2e-4, 5e-6, 0.5)
LEAST = (5e-4, 0.5, 1e-3, 1e-11, 1e-12, 1e-12, 1e-12, 1e-6, 1e-7, 1e-9, 0.01)
MOST = (2e-2, 2.0, 20.0, 1e-5, 1e-5, 1e-3, 1e-3, 1e-1, 1e-1, 1e-2, 1.0)
#: Timings that a design needs, at least.
ENOUGH = 15
#: The penalty for a coefficient that is e times its starting value. It keeps the fits of designs with few timings
#: near the start.
PRIOR = 0.02
#: Logarithm of a ratio beyond which an error is an outlier.
OUTLIER = 0.15


class Timing(NamedTuple):
    """One variant on one problem; ``weight`` is what it counts in a fit."""

    text: str
    gpu: str
    kind: str
    row: Row
    ms: float
    weight: float


def timings(kernel: Kernel, tunings: Iterable[Tuning]) -> Iterator[Timing]:
    for tuning in tunings:
        for kind in tuning.kinds:
            for row in tuning.rows(kind):
                yield from of_row(kernel, tuning.gpu, kind, row)


def of_row(kernel: Kernel, gpu: str, kind: str, row: Row) -> Iterator[Timing]:
    best = min(row.times.values())
    for label, ms in row.times.items():
        yield Timing(f"{kernel.head}:{label}", gpu, kind, row, ms, math.sqrt(best / ms))


def every(kernel: Kernel) -> list[Timing]:
    """All that a model is fitted to."""
    return [*timings(kernel, tunings(kernel)), *random_points(kernel)]


def fitted(points: Iterable[Timing]) -> dict[str, dict[str, float]]:
    """Coefficients by design."""
    designs = defaultdict[str, list[tuple[Timing, Work]]](list)
    for point in points:
        if tiles := geometry(point.text):
            of = GPUS[point.gpu]
            work = work_of(tiles, point.row.sizes, int(of["sm_count"]), of["bandwidth"])
            designs[tiles.design].append((point, work))
    return {
        design: least_squares([point for point, _ in pairs], [work for _, work in pairs])
        for design, pairs in sorted(designs.items())
        if len(pairs) >= ENOUGH
    }


def least_squares(of: Sequence[Timing], works: Sequence[Work]) -> dict[str, float]:
    """By Levenberg and Marquardt, in the logarithms of the coefficients."""
    work: Any = Work(*np.array(works, dtype=float).T)
    measured = np.log([point.ms for point in of])
    weights = np.array([point.weight for point in of])
    least, most = np.log(LEAST), np.log(MOST)

    start = np.log(START)

    def errors(at: Any) -> Any:
        coefficients = dict(zip(COEFFICIENTS, np.exp(at), strict=True))
        residuals = weights * (np.log(milliseconds(work, coefficients)) - measured)
        return np.concatenate([residuals, PRIOR * (at - start)])

    def loss(residuals: Any) -> float:
        return float(np.sum(np.sqrt(1 + (residuals / OUTLIER) ** 2)))

    at, damping = start, 1e-2
    now = errors(at)
    for _ in range(100):
        slopes = np.stack([(errors(at + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(at))])
        trust = 1 / np.sqrt(1 + (now / OUTLIER) ** 2)
        square, slope = (slopes * trust) @ slopes.T, slopes @ (trust * now)
        before = loss(now)
        while damping < 1e6:
            move = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slope)
            there = np.clip(at + move, least, most)
            trial = errors(there)
            if loss(trial) < before:
                at, now, damping = there, trial, damping / 4
                break
            damping *= 4
        if damping >= 1e6 or before - loss(now) < 1e-6 * before:
            break
    return {name: float(f"{x:.4g}") for name, x in zip(COEFFICIENTS, np.exp(at), strict=True)}


def kernels() -> list[Kernel]:
    """Those that have a timing model."""
    return [k for k in FAMILY.kernels if k.language == "cuda" and k.tunable.shape is not None]


def tunings(kernel: Kernel) -> list[Tuning]:
    """All that is in tables."""
    return [tuning for tuning in timed(SOURCES, kernel.head) if tuning.arch == ARCH]


def random_points(kernel: Kernel) -> Iterator[Timing]:
    """What was timed on random problems, whose variants are those that wheels held."""
    for path in random_files():
        record = json.loads(path.read_text(encoding="utf-8"))
        for point in record["points"]:
            if point["kernel"] == kernel.head:
                row = Row(point["sizes"], point["ms"])
                yield from of_row(kernel, record["gpu"], point["kind"], row)


def random_files() -> list[Path]:
    return sorted(models_file(SOURCES, ARCH).parent.glob("*-random-*.json"))


def tables() -> dict[str, str]:
    """Digests of the tables that the models are fitted to, by file."""
    label = ARCH.replace("_", "")
    paths = [*sorted((SOURCES / FOLDER).glob(f"{label}*.json")), *random_files()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def document() -> dict[str, Any]:
    return {
        "schema": 1,
        "family": FAMILY.name,
        "arch": ARCH,
        "tables": tables(),
        "gpus": GPUS,
        "kernels": {k.head: fitted(every(k)) for k in kernels()},
    }


# --- Random scans -----------------------------------------------------------------------------


def measure(number: int, seed: int, budget: float | None) -> int:
    """Time random scans, and write their points; the exit status."""
    try:
        tuner = tuner_for(None, budget)
    except UsageError as error:
        print(f"tools/timing_model.py: error: {error}", file=sys.stderr)
        return 2
    tuner.only = installed(Target(tuner.device.capability), lambda _: True)
    watched(tuner, list(posed(draw(number, seed), ["cuda"])))
    if not tuner.tuned:
        print("tools/timing_model.py: error: nothing was timed", file=sys.stderr)
        return 2
    print(write_points(tuner.tuned, seed, models_file(SOURCES, tuner.device.arch).parent))
    return 0


def write_points(tuned: Sequence[TuningResult], seed: int, folder: Path) -> Path:
    """A file of the times on each problem, by label."""
    run = tuned[0].measured.run
    gpu = re.sub(r"[^a-z0-9]+", "-", run.gpu.lower().removeprefix("nvidia")).strip("-")
    points = [
        {
            "kernel": measured.kernel,
            "kind": measured.shape.kind,
            "problem": measured.problem,
            "sizes": dict(measured.shape.sizes),
            "ms": measured.times,
        }
        for measured in (result.measured for result in tuned)
    ]
    path = folder / f"{ARCH.replace('_', '')}-random-{seed}-{gpu}.json"
    facts = {"schema": 1, "gpu": run.gpu, "date": run.date, "seed": seed}
    write_records(path, {**facts, "points": points})
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--random", type=int, metavar="N", help="time N random scans on this GPU")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the scans; default: 1")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin nothing after that")
    options = parser.parse_args()
    if options.random:
        return measure(options.random, options.seed, options.budget)
    written = models_file(SOURCES, ARCH)
    written.parent.mkdir(exist_ok=True)
    written.write_text(json.dumps(document(), indent=1) + "\n", encoding="utf-8")
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
