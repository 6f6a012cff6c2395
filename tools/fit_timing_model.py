"""Fit the timing models of linear_scan's kernels to the tuning tables, or say how good their choices are.

    python tools/fit_timing_model.py            # write kernels/linear_scan/tuning/models/; seconds
    python tools/fit_timing_model.py --regret   # by cross-validation; half a minute

Run it whenever a table has changed, in a checkout installed by ``pip install -e . -C archs=none``. It needs numpy.

Of each kernel and design the coefficients are those with the least squares of the logarithms of predicted over measured
times, of all GPUs of an architecture together. A variant counts the less the slower it is than the fastest on its problem,
and an outlier hardly more than what is 15% off.

``--regret`` is the time of the chosen variant over that of the fastest, of the variants that wheels hold. Each problem is
left out in turn, on all GPUs: of the rows, all of its sizes; with ``lines`` also all that have as many scans; and of the fit
in both cases the latter, a sixth of them at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scan_registry.dispatch.rows import TuningMatch
from scan_registry.kernels.linear_scan.space import COLUMN_WEIGHTS
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
from scan_registry.kernels.tuning import Model, Row, Shape, Tuning

#: The sources: what is installed may have no tables.
SOURCES = Path(__file__).resolve().parents[1] / "kernels" / FAMILY.name
ARCH = "sm_90"
#: SMs, and what they stream from and to DRAM in bytes per ms, of those with tables.
GPUS: Model = {
    "NVIDIA H200": {"sm_count": 132, "bandwidth": 4.38e9},
    "NVIDIA H100 80GB HBM3": {"sm_count": 132, "bandwidth": 3.0e9},
}
#: Where a fit starts, and the limits of what it may find.
START = (2e-3, 1.0, 0.05, 1e-7, 1e-7, 1e-6, 8e-4, 2e-4, 5e-6, 0.5)
LEAST = (5e-4, 0.5, 1e-3, 1e-11, 1e-12, 1e-12, 1e-6, 1e-7, 1e-9, 0.01)
MOST = (2e-2, 2.0, 2.0, 1e-5, 1e-5, 1e-3, 1e-1, 1e-1, 1e-2, 1.0)
#: Timings that a design needs, at least.
ENOUGH = 15
#: The penalty for a coefficient that is e times its starting value. It keeps the fits of designs with few timings
#: near the start.
PRIOR = 0.02
#: Logarithm of a ratio beyond which an error is an outlier.
OUTLIER = 0.15
FOLDS = 6


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
    for each in points:
        if found := geometry(each.text):
            of = GPUS[each.gpu]
            work = work_of(found, each.row.sizes, int(of["sm_count"]), of["bandwidth"])
            designs[found.design].append((each, work))
    return {
        design: least_squares([each for each, _ in found], [work for _, work in found])
        for design, found in sorted(designs.items())
        if len(found) >= ENOUGH
    }


def least_squares(of: Sequence[Timing], works: Sequence[Work]) -> dict[str, float]:
    """By Levenberg and Marquardt, in the logarithms of the coefficients."""
    work: Any = Work(*np.array(works, dtype=float).T)
    measured = np.log([each.ms for each in of])
    weights = np.array([each.weight for each in of])
    least, most = np.log(LEAST), np.log(MOST)

    start = np.log(START)

    def errors(at: Any) -> Any:
        coefficients = dict(zip(COEFFICIENTS, np.exp(at), strict=True))
        found = weights * (np.log(milliseconds(work, coefficients)) - measured)
        return np.concatenate([found, PRIOR * (at - start)])

    def loss(found: Any) -> float:
        return float(np.sum(np.sqrt(1 + (found / OUTLIER) ** 2)))

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
            found = errors(there)
            if loss(found) < before:
                at, now, damping = there, found, damping / 4
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
    return [each for each in timed(SOURCES, kernel.head) if each.arch == ARCH]


def random_points(kernel: Kernel) -> Iterator[Timing]:
    """What was timed on random problems, whose variants are those that wheels held."""
    for path in random_files():
        found = json.loads(path.read_text(encoding="utf-8"))
        for point in found["points"]:
            if point["kernel"] == kernel.head:
                row = Row(point["sizes"], point["ms"])
                yield from of_row(kernel, found["gpu"], point["kind"], row)


def random_files() -> list[Path]:
    return sorted(models_file(SOURCES, ARCH).parent.glob("*-random-*.json"))


def tables() -> dict[str, str]:
    """Digests of the tables that the models are fitted to, by file."""
    label = ARCH.replace("_", "")
    found = [*sorted((SOURCES / FOLDER).glob(f"{label}*.json")), *random_files()]
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in found}


def document() -> dict[str, Any]:
    return {
        "schema": 1,
        "family": FAMILY.name,
        "arch": ARCH,
        "tables": tables(),
        "gpus": GPUS,
        "kernels": {k.head: fitted(every(k)) for k in kernels()},
    }


# --- Regret -----------------------------------------------------------------------------------


def chosen(
    kernel: Kernel,
    tuning: Tuning,
    model: Model,
    of: tuple[str, Row],
    rows: Sequence[Row],
    held: set[str],
) -> str | None:
    """What selection takes of the variants that the row ``of`` times, by the other rows."""
    kind, problem = of
    shape = Shape(kind, problem.sizes, COLUMN_WEIGHTS if "channels" in problem.sizes else {})
    nearest = min(rows, key=lambda row: row.distance(shape), default=None)
    if nearest is None or math.isinf(nearest.distance(shape)):
        return None
    known = Row(nearest.sizes, {k: ms for k, ms in nearest.times.items() if k in held})
    with_model = replace(tuning, model=model)
    match = TuningMatch(
        with_model,
        known,
        nearest.distance(shape),
        False,
        shape,
        with_model.sm_count if model else None,
    )
    counts = {
        label: match.ms(kernel, f"{kernel.head}:{label}")
        for label in problem.times
        if label in held
    }
    found = {label: ms for label, ms in counts.items() if ms is not None}
    return min(found, key=lambda label: found[label], default=None)


def same(a: Row, b: Row, lines: bool) -> bool:
    """Whether cross-validation leaves one row out together with the other."""
    if lines and "channels" in a.sizes:
        return a.sizes["lines"] == b.sizes["lines"]
    near = abs(math.log2(a.sizes["time"] / b.sizes["time"])) <= 1.01
    return a.sizes == b.sizes or (lines and a.sizes["lines"] == b.sizes["lines"] and near)


def regret(lines: bool) -> None:
    found = defaultdict[tuple[str, str], list[float]](list)
    for kernel in kernels():
        own = tunings(kernel)
        held = {label for tuning in kernel.tunable.tunings() for label in tuning.labels}
        points = every(kernel)
        groups = sorted({_group(each.row) for each in timings(kernel, own)})
        random.Random(0).shuffle(groups)
        for fold in range(FOLDS):
            out = set(groups[fold::FOLDS])
            fit = fitted(each for each in points if _group(each.row) not in out)
            for tuning in own:
                model = {"gpu": GPUS[tuning.gpu], **fit}
                for kind, row in ((k, r) for k in tuning.kinds for r in tuning.rows(k)):
                    times = {label: ms for label, ms in row.times.items() if label in held}
                    if _group(row) not in out or len(times) < 2:
                        continue
                    rows = [each for each in tuning.rows(kind) if not same(each, row, lines)]
                    for name, of in (("row", {}), ("model", model)):
                        label = chosen(kernel, tuning, of, (kind, row), rows, held)
                        if label is not None:
                            ratio = times[label] / min(times.values())
                            found[name, f"{tuning.gpu} {kernel.name}"].append(ratio)
                            found[name, "all"].append(ratio)
    print(f"left out: {'all of as many scans' if lines else 'the sizes'}")
    for (name, of), ratios in sorted(found.items(), key=lambda each: each[0][::-1]):
        mean, ordered = math.exp(sum(map(math.log, ratios)) / len(ratios)), sorted(ratios)
        tenth = ordered[int(0.9 * (len(ordered) - 1))]
        print(
            f"  {of}, {name}: {mean:.4f} in the mean of {len(ratios)}, a tenth over {tenth:.3f}, "
            f"{ordered[-1]:.3f} at worst"
        )


def _group(row: Row) -> tuple[float, float]:
    """The group of a row. Cross-validation leaves the rows of a group out together."""
    return row.sizes["lines"], 0.0 if "channels" in row.sizes else row.sizes["time"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--regret", action="store_true", help="cross-validate; writes nothing")
    if parser.parse_args().regret:
        for lines in (False, True):
            regret(lines)
        return 0
    written = models_file(SOURCES, ARCH)
    written.parent.mkdir(exist_ok=True)
    written.write_text(json.dumps(document(), indent=1) + "\n", encoding="utf-8")
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
