"""Tuning tables: files of evidence, and what selection needs of them.

``kernels/<family>/tuning/<arch>.json`` holds every time that was measured: for each problem the median
and the spread of every variant that was tried, and of each run the GPU, its clocks, the driver, the
compilers and the date. It is for all GPUs of the architecture; an exclusive one beside it,
``<arch>-<gpu>.json``, is for those of one name alone. Files are for people and for builds; a wheel's archives
hold the ``Tuning`` that each reduces to, and for the JIT there is ``tuning/reduced/<kernel>.<language>.json``,
which builds leave.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.tuning import (
    Row,
    Shape,
    Tuning,
    capability_of,
    fewest,
    positive,
    worthwhile,
)

SCHEMA = 1
FOLDER = "tuning"
_REDUCED = "reduced"
#: A variant within this of the fastest is as good, unless something else is said: what fewer variants can serve,
#: fewer do.
EQUAL = 1.04
#: What a variant has to gain for GPUs of one name alone to be in wheels: a percent on each of ten problems.
WORTH = 0.1


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


class Timing(NamedTuple):
    """Median and spread (largest less smallest) in ms, over ``rounds`` rounds."""

    ms: float
    spread: float
    rounds: int


@dataclass(frozen=True)
class Measured:
    """All that was measured on one problem.

    kernel   how its variants begin, such as ``linear_scan.time_last_forward:cuda``
    problem  in words, for people
    timings  by the variants' labels
    run      of the timings, the last; times of variants that it left out are an earlier one's
    within   of the fastest's time, how many times that a variant may take and is as good
    """

    kernel: str
    problem: str
    shape: Shape
    timings: Mapping[str, Timing]
    run: Run
    within: float = EQUAL

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
        return tuple(dict.fromkeys(each.run.gpu for each in self.measured))

    def with_newer(
        self, newer: Iterable[Measured], timed: Callable[[str], bool] = lambda _: True
    ) -> Table:
        """The table with further measurements, which replace those of the same problems; but times of variants
        stay, unless ``timed`` says of their names that they were to be timed."""
        every = {each.place: each for each in self.measured}
        for each in newer:
            older = every.get(each.place)
            every[each.place] = each.over(older, timed) if older else each
        return replace(self, measured=tuple(sorted(every.values(), key=lambda m: m.place)))

    def beside(self, held: Collection[str]) -> Table:
        """The table, of one kernel, without the times of variants that are not worth a place in wheels beside those
        ``held``, which are given by their labels."""
        times = [each.times for each in self.measured]
        kept = worthwhile(times, held, WORTH)
        return replace(self, measured=tuple(each.of(kept) for each in self.measured))

    def tunings(self, spare: Collection[str] = ()) -> dict[str, Tuning]:
        """What selection needs, by how the kernels' variants begin: the times of few variants that are enough,
        and of those with labels in ``spare``, which may be left where others do not fit."""
        kernels: dict[str, list[Measured]] = {}
        for each in self.measured:
            kernels.setdefault(each.kernel, []).append(each)
        return {
            kernel: _reduced(self.arch, found, spare, self.exclusive)
            for kernel, found in kernels.items()
        }

    def to_json(self) -> dict[str, Any]:
        runs = list(dict.fromkeys(json.dumps(asdict(each.run)) for each in self.measured))
        return {
            "schema": SCHEMA,
            "family": self.family,
            "arch": self.arch,
            "runs": [json.loads(run) for run in runs],
            "measured": [
                {
                    "kernel": each.kernel,
                    "kind": each.shape.kind,
                    "problem": each.problem,
                    "sizes": dict(each.shape.sizes),
                    "run": runs.index(json.dumps(asdict(each.run))),
                    **({} if each.within == EQUAL else {"within": each.within}),
                    "ms_spread_rounds": {
                        _short(label, each.shape.kind): [timing.ms, timing.spread, timing.rounds]
                        for label, timing in each.timings.items()
                    },
                }
                for each in self.measured
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
            ",\n".join(f"  {json.dumps(each, ensure_ascii=False)}" for each in document.pop(name))
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
    within = positive(record.get("within", EQUAL))
    if within < 1:
        raise ValueError(f"within is {within}; nothing takes less than the best time")
    return Measured(record["kernel"], record["problem"], shape, timings, run, within)


def _short(label: str, kind: str) -> str:
    """The label without the kind, which most of them begin with: what is left begins with a comma."""
    rest = label.removeprefix(kind)
    return rest if rest.startswith(",") else label


def _long(short: str, kind: str) -> str:
    return f"{kind}{short}" if short.startswith(",") else short


def _reduced(
    arch: str, measured: Sequence[Measured], spare: Collection[str], exclusive: bool
) -> Tuning:
    kinds: dict[str, list[Measured]] = {}
    for each in measured:
        kinds.setdefault(each.shape.kind, []).append(each)
    latest = max(measured, key=lambda each: each.run.date)
    return Tuning.of(
        arch,
        latest.run.gpu,
        latest.run.date,
        {kind: _rows(found, spare) for kind, found in sorted(kinds.items())},
        exclusive,
    )


def _rows(measured: Sequence[Measured], spare: Collection[str]) -> tuple[Row, ...]:
    """A row names what is chosen for its problem along with those that ask for as much or more, so problems that
    ask for less change nothing for it."""
    chosen, held = dict[float, set[str]](), set(spare)
    for within in sorted({each.within for each in measured}):
        held |= set(chosen_labels([m for m in measured if m.within <= within], held))
        chosen[within] = set(held)
    rows = []
    for each in measured:
        named = chosen[each.within]
        times = each.of(named).times
        order = sorted(times, key=lambda label: (times[label], label))
        rows.append(Row(each.shape.sizes, {label: _rounded(times[label]) for label in order}))
    return tuple(rows)


def _rounded(ms: float) -> float:
    """In as many digits as choosing needs, since wheels hold thousands: a tenth of a percent is noise."""
    return float(f"{ms:.4g}")


def chosen_labels(measured: Sequence[Measured], held: Collection[str] = ()) -> tuple[str, ...]:
    """Few variants of which one, or one of those ``held``, is as good as the fastest on each problem."""
    return fewest([each.times for each in measured], [each.within for each in measured], held)


@cache
def tables(folder: Path, kernel: str | None = None) -> tuple[Table, ...]:
    """The tables in a family's folder, by architecture, or what they hold of one kernel; ``ValueError``
    names a file that holds none."""
    return tuple(Table.read(path, kernel) for path in sorted((folder / FOLDER).glob("*.json")))


@cache
def shipped(
    folder: Path, kernel: str, spare: tuple[str, ...] = (), usual: tuple[str, ...] = ()
) -> tuple[Tuning, ...]:
    """The tunings in a family's folder of one kernel, given by how its variants begin: as builds have left
    them, which takes a tenth of the time, else out of the tables. Variants with labels in ``usual`` wheels hold
    anyway, as they do what an architecture's table names, so those of its single GPUs may have them."""
    left = _reduced_file(folder, kernel)
    if left.is_file():
        return tuple(map(Tuning.from_json, json.loads(left.read_text(encoding="utf-8"))))
    found = [table for table in tables(folder, kernel) if table.measured]
    general = {each.arch: each.tunings(spare)[kernel] for each in found if not each.exclusive}
    held = {arch: {*usual, *tuning.labels} for arch, tuning in general.items()}
    alone = (each.beside(held.get(each.arch, usual)) for each in found if each.exclusive)
    return (*general.values(), *(each.tunings(spare)[kernel] for each in alone))


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
    tables.cache_clear()
    shipped.cache_clear()


def _reduced_file(folder: Path, kernel: str) -> Path:
    name = kernel.partition(".")[2].replace(":", ".")
    return folder / FOLDER / _REDUCED / f"{name}.json"
