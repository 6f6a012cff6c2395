"""What tuning found out of one kernel, in the form that selection looks it up in.

A ``Tuning`` is small and is read in parts: a first call pays for the rows of one kind alone. The
evidence behind it, every variant's time and its spread, is a ``tables.Table``.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from typing import Any, TypeAlias

from scan_registry.base.frozen import dataclass

#: Coefficients of a timing model, by what they are of.
Model: TypeAlias = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Shape:
    """Where a problem lies among those that a kernel is tuned for.

    kind     what has to be equal for two problems to be compared, such as dtypes and access
    sizes    positive numbers by name; what counts is the ratio of two problems' sizes
    weights  how much a size counts, by its name; 1 for those that are not here
    """

    kind: str
    sizes: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)

    def unweighted(self) -> Shape:
        """What is recorded of it."""
        return Shape(self.kind, self.sizes)


@dataclass(frozen=True)
class Row:
    """One tuned problem: its sizes, and milliseconds by variant, the fastest first.

    Variants go by their labels: see ``Kernel.label``.
    """

    sizes: Mapping[str, float]
    times: Mapping[str, float]

    def distance(self, other: Shape) -> float:
        """How far away a problem is: the length of the ratios' logarithms, to base 2, each by its weight;
        infinite where the sizes do not have the same names."""
        return _distance(self.sizes, other)


def _distance(sizes: Mapping[str, float], other: Shape) -> float:
    if sizes.keys() != other.sizes.keys():
        return math.inf
    there, weight = other.sizes, other.weights.get
    return math.hypot(*[weight(n, 1.0) * math.log2(there[n] / size) for n, size in sizes.items()])


@dataclass(frozen=True)
class Tuning:
    """The rows of one kernel in one language, measured on one GPU.

    arch       the GPU's architecture, such as ``sm_90``
    date       of the latest measurement, such as ``2026-01-31``
    names      of the sizes
    labels     of every variant that a row names
    kinds      kind -> rows, as JSON, so that they are read by themselves: each is sizes in the order of
               ``names`` (null for one that it does not have), and pairs of a variant's place in
               ``labels`` and its milliseconds
    exclusive  whether it is for GPUs of that name alone, where another is for all of the architecture
    model      coefficients of the kernel's timing model, fitted to rows of all GPUs of the architecture: see
               ``Tunable.predicted``; empty if there is none
    """

    arch: str
    gpu: str
    date: str
    names: Sequence[str]
    labels: Sequence[str]
    kinds: Mapping[str, str]
    exclusive: bool = False
    model: Model = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        arch: str,
        gpu: str,
        date: str,
        rows: Mapping[str, Sequence[Row]],
        exclusive: bool = False,
    ) -> Tuning:
        """Made of rows by their kind."""
        every = [row for of_kind in rows.values() for row in of_kind]
        names = list(dict.fromkeys(name for row in every for name in row.sizes))
        labels = list(dict.fromkeys(label for row in every for label in row.times))
        number = {label: n for n, label in enumerate(labels)}
        listed = {
            kind: [
                [
                    [row.sizes.get(name) for name in names],
                    [[number[label], ms] for label, ms in row.times.items()],
                ]
                for row in of_kind
            ]
            for kind, of_kind in rows.items()
        }
        kinds = {kind: json.dumps(text, separators=(",", ":")) for kind, text in listed.items()}
        return cls(arch, gpu, date, names, labels, kinds, exclusive)

    def only(self, labels: Mapping[str, Collection[str]]) -> Tuning:
        """With the times of some variants alone, given by their labels for each kind; rows that have none of them are
        left out, and other kinds. Of times three digits stay, since wheels hold thousands: half a percent is noise."""
        rows: dict[str, list[Row]] = {}
        for kind, kept in labels.items():
            kept_rows = (
                Row(row.sizes, {k: float(f"{t:.3g}") for k, t in row.times.items() if k in kept})
                for row in self.rows(kind)
            )
            if named := [row for row in kept_rows if row.times]:
                rows[kind] = named
        fewer = Tuning.of(self.arch, self.gpu, self.date, rows, self.exclusive)
        return replace(fewer, model=self.model)

    def serves(self, gpu: str) -> bool:
        """Whether it says anything about GPUs of a name, if they are of the architecture."""
        return not self.exclusive or self.gpu == gpu

    def with_newer(self, newer: Tuning) -> Tuning:
        """This with the rows of a later one for the same GPU, which replace those of the same sizes;
        ``ValueError`` if rows of either are not right."""
        rows: dict[str, list[Row]] = {}
        for kind in dict.fromkeys((*self.kinds, *newer.kinds)):
            later = newer.rows(kind)
            sizes = [row.sizes for row in later]
            rows[kind] = [*later, *(row for row in self.rows(kind) if row.sizes not in sizes)]
        return Tuning.of(newer.arch, newer.gpu, newer.date, rows, newer.exclusive)

    @property
    def capability(self) -> tuple[int, int]:
        """(9, 0) for ``sm_90``."""
        return capability_of(self.arch)

    @property
    def sm_count(self) -> int:
        """Of the GPU, as the timing model states it."""
        return int(self.model["gpu"]["sm_count"])

    def rows(self, kind: str) -> tuple[Row, ...]:
        """Those of one kind; ``ValueError`` if they are not what is stated above."""
        with self._reading(kind) as listed:
            return tuple(self._row(sizes, times) for sizes, times in listed)

    @contextmanager
    def _reading(self, kind: str) -> Iterator[Any]:
        text = self.kinds.get(kind, "[]")
        try:
            yield json.loads(text)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(f"the rows of a tuning are {text!r}") from error

    def _row(self, sizes: Any, times: Any) -> Row:
        return Row(self._sizes(sizes), {self.labels[n]: positive(ms) for n, ms in times})

    def _sizes(self, sizes: Any) -> dict[str, float]:
        pairs = zip(self.names, sizes, strict=True)
        return {name: positive(size) for name, size in pairs if size is not None}

    def wins(self) -> Counter[str]:
        """In how many rows each label is the fastest."""
        rows = [row for kind in self.kinds for row in self.rows(kind)]
        return Counter(next(iter(row.times)) for row in rows if row.times)

    def nearest(self, shape: Shape) -> tuple[float, Row] | None:
        """The row of the shape's kind that is closest to it, and how far away it is; of equals the
        first. None if the kind was never tuned."""
        with self._reading(shape.kind) as listed:
            rows = [
                (_distance(self._sizes(sizes), shape), n) for n, (sizes, _) in enumerate(listed)
            ]
            distance, number = min(rows, default=(math.inf, 0))
            return None if math.isinf(distance) else (distance, self._row(*listed[number]))

    def _check_types(self) -> None:
        lists = isinstance(self.kinds, Mapping) and isinstance(self.names, list)
        if not (lists and isinstance(self.exclusive, bool) and isinstance(self.model, Mapping)):
            raise TypeError("a field of another type")
        texts = self.gpu, self.date, *self.names, *self.labels, *self.kinds.values()
        models = all(isinstance(model, Mapping) for model in self.model.values())
        counted = not self.model or self.sm_count > 0
        if not (models and counted and all(isinstance(text, str) for text in texts)):
            raise TypeError("a field of another type")

    @classmethod
    def from_json(cls, record: Any) -> Tuning:
        """What ``asdict`` gave; ``ValueError`` for anything else. Rows are read when they are asked for,
        and raise it then."""
        try:
            tuning = cls(**record)
            capability_of(tuning.arch)
            tuning._check_types()
        except (KeyError, TypeError) as error:
            raise ValueError(f"{record!r} is not a kernel's tuning") from error
        return tuning


def few(problems: Sequence[Mapping[str, float]], within: float, worth: float) -> set[str]:
    """The ``fewest`` labels for the problems, and what is ``worthwhile`` beside them."""
    return worthwhile(problems, fewest(problems, within), worth)


def fewest(problems: Sequence[Mapping[str, float]], within: float) -> tuple[str, ...]:
    """Few labels, of which each problem, milliseconds by label, has one whose time is at most ``within`` times its
    least: greedily, the label that serves most of the problems that have none yet."""
    best = [min(times.values()) for times in problems]
    fit = {
        number: {label for label, ms in times.items() if ms <= within * best[number]}
        for number, times in enumerate(problems)
    }
    chosen: list[str] = []
    while fit:
        labels = sorted({label for labels in fit.values() for label in labels})
        served = {label: [n for n, labels in fit.items() if label in labels] for label in labels}

        def preference(label: str) -> tuple[int, float, str]:
            """Most problems; among equals the least time over the fastest, then by name."""
            numbers = served[label]  # noqa: B023  called before the next turn
            ratios = (problems[n][label] / best[n] for n in numbers)
            return -len(numbers), sum(ratios), label

        label = min(labels, key=preference)
        chosen.append(label)
        fit = {n: labels for n, labels in fit.items() if label not in labels}
    return tuple(chosen)


def worthwhile(
    problems: Sequence[Mapping[str, float]], shipped: Collection[str], worth: float
) -> set[str]:
    """What is ``held``, and labels that are worth a place beside it: greedily, the label that gains most, while it
    gains at least ``worth``. What a label gains is the logarithm of how many times faster it makes a problem,
    milliseconds by label, than what there is, summed over problems; more than 1 where there is nothing."""
    kept = set(shipped)
    while True:
        gains = defaultdict[str, float](float)
        for times in problems:
            there = [ms for label, ms in times.items() if label in kept]
            now = min(there, default=math.e * max(times.values()))
            for label, ms in times.items():
                gains[label] += math.log(now / ms) if ms < now else 0.0
        gain, label = max(((gain, label) for label, gain in gains.items()), default=(0.0, ""))
        if gain < worth:
            return kept
        kept.add(label)


def needed(
    problems: Sequence[Mapping[str, float]], shipped: Collection[str], within: float, worth: float
) -> set[str]:
    """``shipped`` without labels that others of them can stand in for: greedily, the label that costs least, while it costs less
    than ``worth`` and leaves each problem that has it another one whose time is at most ``within`` times the least."""
    kept = set(shipped)

    def cost(label: str) -> float:
        """The sum of the logarithms of how many times longer problems would take."""
        total = 0.0
        for times in problems:
            others = [ms for name, ms in times.items() if name in kept and name != label]
            ms = min(others, default=math.inf)
            if label in times and times[label] < ms:
                if ms > within * min(times.values()):
                    return math.inf
                total += math.log(ms / times[label])
        return total

    while kept:
        least, label = min((cost(label), label) for label in kept)
        if least >= worth:
            break
        kept.remove(label)
    return kept


def capability_of(arch: str) -> tuple[int, int]:
    """(9, 0) for ``sm_90``; ``ValueError`` for what is no GPU's architecture."""
    number = arch[3:] if isinstance(arch, str) and arch.startswith("sm_") else ""
    if not (number.isdecimal() and len(number) in (2, 3)):
        raise ValueError(f"{arch!r} is not a GPU's architecture, such as sm_90")
    return int(number[:-1]), int(number[-1])


def positive(value: Any) -> float:
    """The number; ``ValueError`` unless it is finite and more than nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a positive number")
    return value


def arch_distance(tuning: Tuning, capability: tuple[int, int]) -> tuple[bool, bool, int]:
    """How far a tuning's GPU is from one of another capability; less is nearer. The same major version
    comes first, then what is not later than the GPU, then the smaller step."""
    number, there = (10 * major + minor for major, minor in (tuning.capability, capability))
    return tuning.capability[0] != capability[0], number > there, abs(number - there)


def nearest_arch(tunings: Iterable[Tuning], capability: tuple[int, int]) -> Tuning | None:
    """The tuning whose GPU has the nearest architecture, whatever the GPU's name."""
    general = (tuning for tuning in tunings if not tuning.exclusive)
    return min(general, key=lambda tuning: arch_distance(tuning, capability), default=None)


#: Where a kernel's shipped tunings come from; called when they are first needed.
Source = Callable[[], tuple[Tuning, ...]]
