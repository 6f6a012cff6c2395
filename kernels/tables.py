"""Tuning tables: files of evidence, and what selection needs of them.

``kernels/<family>/tuning/<arch>.json`` holds every time that was measured: for each problem the median
and the spread of every variant that was tried, and of each run the GPU, its clocks, the driver, the
compilers and the date. It is for all GPUs of the architecture; an exclusive one beside it,
``<arch>-<gpu>.json``, is for those of one name alone. Files are for people and for builds; a wheel's archives
hold the ``Tuning`` that each reduces to, and for the JIT there is ``tuning/reduced/<kernel>.<language>.json``,
which builds leave. ``tuning/models/<arch>.json`` holds the timing models that are fitted to the tables.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.tuning import (
    Model,
    Row,
    Shape,
    Tuning,
    capability_of,
    few,
    needed,
    positive,
)

SCHEMA = 1
FOLDER = "tuning"
_REDUCED, _MODELS = "reduced", "models"
#: On the machine that was tuned, a variant whose time is at most this many times the fastest's counts as equally
#: good, so that few variants serve all problems.
EQUAL = 1.04
#: The same for the variants in wheels; and how much a further variant has to gain to be in them, summed over
#: problems: such as 1% on each of forty problems. Of all these, one that gains less is left out again if no problem, and no point
#: that timing models are fitted to, then takes more than the last number of times the fastest's time.
ENOUGH, WORTH, STANDING_IN = 1.08, 0.4, 1.11


@dataclass(frozen=True)
class Run:
    """Where and when something was measured. ``clocks`` in MHz and ``toolchain``, a compiler by
    language, say what was known of them; ``version`` is this package's."""

    gpu: str
    driver: str
    clocks: Mapping[str, int]
    toolchain: Mapping[str, str]
    version: str
    date: str


#: By kind, times of problems in ms by label.
Points: TypeAlias = Mapping[str, Sequence[Mapping[str, float]]]


class Timing(NamedTuple):
    """Median and spread (largest less smallest) in ms, over ``rounds`` rounds."""

    ms: float
    spread: float
    rounds: int


@dataclass(frozen=True)
class Measured:
    """All that was measured on one problem.

    kernel   how its variants begin, ``family.kernel:language``
    problem  in words, for people
    timings  by the variants' labels
    run      of the timings, the last; times of variants that it left out are an earlier one's
    """

    kernel: str
    problem: str
    shape: Shape
    timings: Mapping[str, Timing]
    run: Run

    @property
    def place(self) -> tuple[str, str, tuple[tuple[str, float], ...]]:
        """What a later measurement of the same problem has in common with it."""
        return self.kernel, self.shape.kind, tuple(sorted(self.shape.sizes.items()))

    @property
    def times(self) -> dict[str, float]:
        """Milliseconds by label."""
        return {label: timing.ms for label, timing in self.timings.items()}

    def of(self, labels: Collection[str]) -> Measured:
        """With the times of some variants alone."""
        return replace(self, timings={k: t for k, t in self.timings.items() if k in labels})

    def over(self, older: Measured, timed: Callable[[str], bool]) -> Measured:
        """With what an older measurement says of the variants that this one was not to time."""
        times = older.timings.items()
        kept = {label: time for label, time in times if not timed(f"{self.kernel}:{label}")}
        return replace(self, timings={**kept, **self.timings})


@dataclass(frozen=True)
class Table:
    """Everything that was measured for one family on GPUs of one architecture, or, of an ``exclusive`` one, on
    those of one name: its file's name says that."""

    family: str
    arch: str
    measured: tuple[Measured, ...] = ()
    exclusive: bool = False

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of those that something was measured on."""
        return tuple(dict.fromkeys(row.run.gpu for row in self.measured))

    def with_newer(
        self, newer: Iterable[Measured], timed: Callable[[str], bool] = lambda _: True
    ) -> Table:
        """The table with further measurements, which replace those of the same problems; but times of variants
        stay, unless ``timed`` says of their names that they were to be timed."""
        every = {row.place: row for row in self.measured}
        for row in newer:
            older = every.get(row.place)
            every[row.place] = row.over(older, timed) if older else row
        return replace(self, measured=tuple(sorted(every.values(), key=lambda m: m.place)))

    def timed(self) -> dict[str, Tuning]:
        """All times in the form that selection needs, by how the kernels' variants begin."""
        kernels: dict[str, list[Measured]] = {}
        for row in self.measured:
            kernels.setdefault(row.kernel, []).append(row)
        return {head: _tuning(self.arch, rows, self.exclusive) for head, rows in kernels.items()}

    def tunings(self) -> dict[str, Tuning]:
        """The same with the times of few variants that are enough."""
        return {
            head: _reduced([timed], EQUAL, math.inf, 0, {})[0]
            for head, timed in self.timed().items()
        }

    def to_json(self) -> dict[str, Any]:
        runs = list(dict.fromkeys(json.dumps(asdict(row.run)) for row in self.measured))
        return {
            "schema": SCHEMA,
            "family": self.family,
            "arch": self.arch,
            "runs": [json.loads(run) for run in runs],
            "measured": [
                {
                    "kernel": row.kernel,
                    "kind": row.shape.kind,
                    "problem": row.problem,
                    "sizes": dict(row.shape.sizes),
                    "run": runs.index(json.dumps(asdict(row.run))),
                    "ms_spread_rounds": {
                        _short(label, row.shape.kind): [timing.ms, timing.spread, timing.rounds]
                        for label, timing in row.timings.items()
                    },
                }
                for row in self.measured
            ],
        }

    @classmethod
    def from_json(cls, document: Any, kernel: str | None = None) -> Table:
        """What ``to_json`` gave, or what it holds of one kernel; ``ValueError`` for anything else."""
        try:
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']!r}; this version reads {SCHEMA}")
            capability_of(document["arch"])
            runs = [Run(**run) for run in document["runs"]]
            return cls(
                document["family"],
                document["arch"],
                tuple(
                    _measured(record, runs)
                    for record in document["measured"]
                    if kernel in (None, record["kernel"])
                ),
            )
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"it is not a tuning table: {error!r}") from error

    @classmethod
    def read(cls, path: Path, kernel: str | None = None) -> Table:
        """The table in a file, or what it holds of one kernel; ``ValueError`` names the file if it holds
        none."""
        try:
            table = cls.from_json(json.loads(path.read_text(encoding="utf-8")), kernel)
            label, alone, _ = path.stem.partition("-")
            if (table.family, table.arch) != (path.parents[1].name, f"sm_{label[2:]}"):
                raise ValueError(f"it is of {table.family} for {table.arch}")
            if alone and len(table.gpus) > 1:
                raise ValueError(f"it is for one GPU, and was measured on {', '.join(table.gpus)}")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return replace(table, exclusive=bool(alone))

    def text(self) -> str:
        """The file's content: a line for each problem, so that two tables can be compared."""
        document = self.to_json()
        lines = [
            ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in document.pop(name))
            for name in ("runs", "measured")
        ]
        start = json.dumps(document, indent=1).removesuffix("\n}")
        return f'{start},\n "runs": [\n{lines[0]}\n ],\n "measured": [\n{lines[1]}\n ]\n}}\n'


def _measured(record: Mapping[str, Any], runs: Sequence[Run]) -> Measured:
    sizes = {str(name): positive(size) for name, size in record["sizes"].items()}
    timings = {
        _long(str(label), record["kind"]): Timing(positive(ms), spread, rounds)
        for label, (ms, spread, rounds) in record["ms_spread_rounds"].items()
    }
    if not timings:
        raise ValueError(f"nothing was measured on {record['problem']!r}")
    shape, run = Shape(record["kind"], sizes), runs[record["run"]]
    return Measured(record["kernel"], record["problem"], shape, timings, run)


def _short(label: str, kind: str) -> str:
    """The label without the kind, which most of them begin with: what is left begins with a comma."""
    rest = label.removeprefix(kind)
    return rest if rest.startswith(",") else label


def _long(short: str, kind: str) -> str:
    return f"{kind}{short}" if short.startswith(",") else short


def _tuning(arch: str, measured: Sequence[Measured], exclusive: bool) -> Tuning:
    kinds: dict[str, list[Row]] = {}
    for problem in measured:
        order = sorted(problem.times.items(), key=lambda timed: (timed[1], timed[0]))
        row = Row(problem.shape.sizes, {label: _rounded(ms) for label, ms in order})
        kinds.setdefault(problem.shape.kind, []).append(row)
    latest = max(measured, key=lambda problem: problem.run.date)
    rows = dict(sorted(kinds.items()))
    return Tuning.of(arch, latest.run.gpu, latest.run.date, rows, exclusive)


def _reduced(
    timed: Sequence[Tuning], within: float, worth: float, standing_in: float, points: Points
) -> list[Tuning]:
    """Of the GPUs of one architecture, with the times of few variants that are enough for all of them."""
    kinds = dict.fromkeys(kind for tuning in timed for kind in tuning.kinds)
    kept = dict[str, set[str]]()
    for kind in kinds:
        rows = [row.times for tuning in timed for row in tuning.rows(kind)]
        labels = few(rows, within, worth)
        beside = [{k: t for k, t in times.items() if k in labels} for times in points.get(kind, ())]
        kept[kind] = needed([*rows, *filter(None, beside)], labels, standing_in, worth)
    return [tuning.only({kind: kept[kind] for kind in tuning.kinds}) for tuning in timed]


def _rounded(ms: float) -> float:
    """In as many digits as choosing needs, since wheels hold thousands: a tenth of a percent is noise."""
    return float(f"{ms:.4g}")


@cache
def tables(folder: Path, kernel: str | None = None) -> tuple[Table, ...]:
    """The tables in a family's folder, by architecture, or what they hold of one kernel; ``ValueError``
    names a file that holds none."""
    return tuple(Table.read(path, kernel) for path in sorted((folder / FOLDER).glob("*.json")))


@cache
def timed(folder: Path, kernel: str) -> tuple[Tuning, ...]:
    """All times in a family's folder of one kernel, given by how its variants begin; wheels have none."""
    tunings = (table.timed()[kernel] for table in tables(folder, kernel) if table.measured)
    return tuple(replace(tuning, model=_model(folder, tuning, kernel)) for tuning in tunings)


@cache
def shipped(folder: Path, kernel: str) -> tuple[Tuning, ...]:
    """The tunings in a family's folder of one kernel: as builds have left them, which takes a tenth of the time, else
    out of the tables. The GPUs of an architecture share their variants."""
    left = _reduced_file(folder, kernel)
    if left.is_file():
        return tuple(map(Tuning.from_json, json.loads(left.read_text(encoding="utf-8"))))
    archs: dict[str, list[Tuning]] = {}
    for tuning in timed(folder, kernel):
        archs.setdefault(tuning.arch, []).append(tuning)
    reduced = (
        _reduced(tunings, ENOUGH, WORTH, STANDING_IN, _points(folder, arch, kernel))
        for arch, tunings in archs.items()
    )
    return tuple(tuning for tunings in reduced for tuning in tunings)


def models_file(folder: Path, arch: str) -> Path:
    """Where the timing models of a family's kernels are, by the GPU's architecture, such as ``sm_90``."""
    return folder / FOLDER / _MODELS / f"{arch.replace('_', '')}.json"


def _points(folder: Path, arch: str, kernel: str) -> Points:
    """Times of further problems, which timing models are fitted to, too."""
    models, points = models_file(folder, arch), dict[str, list[Mapping[str, float]]]()
    for file in sorted(models.parent.glob(f"{models.stem}-random-*.json")):
        for point in json.loads(file.read_text(encoding="utf-8"))["points"]:
            if point["kernel"] == kernel:
                points.setdefault(point["kind"], []).append(point["ms"])
    return points


def _model(folder: Path, tuning: Tuning, kernel: str) -> Model:
    """A kernel's timing model, with what it needs to know of the tuning's GPU; empty if none is fitted."""
    file = models_file(folder, tuning.arch)
    if not file.is_file():
        return {}
    models = json.loads(file.read_text(encoding="utf-8"))
    if tuning.gpu not in models["gpus"] or kernel not in models["kernels"]:
        return {}
    return {"gpu": models["gpus"][tuning.gpu], **models["kernels"][kernel]}


def leave_reduced(folder: Path, kernel: str, tunings: Iterable[Tuning]) -> None:
    """Leave a kernel's tunings for ``shipped``, until ``forget_reduced``."""
    left = _reduced_file(folder, kernel)
    left.parent.mkdir(exist_ok=True)
    left.write_text(
        json.dumps([asdict(tuning) for tuning in tunings], separators=(",", ":")), encoding="utf-8"
    )


def forget_reduced(folder: Path) -> None:
    """Remove what builds have left beside the tables of a family, before those change."""
    shutil.rmtree(folder / FOLDER / _REDUCED, ignore_errors=True)
    for cached in (tables, timed, shipped):
        cached.cache_clear()


def _reduced_file(folder: Path, kernel: str) -> Path:
    name = kernel.partition(".")[2].replace(":", ".")
    return folder / FOLDER / _REDUCED / f"{name}.json"
