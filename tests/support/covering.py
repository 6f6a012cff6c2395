"""A few of many combinations of values, for tests that would take long with all of them. Runs choose alike."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from scan_registry.kernels.model import Variant


def covering(places: Sequence[frozenset[Any]], turn: int = 0) -> list[int]:
    """The numbers of a few sets that have all elements between them. Each ``turn`` begins with another set."""
    numbered = [*enumerate(places)]
    numbered = numbered[turn % len(places) :] + numbered[: turn % len(places)] if places else []
    missing = set[Any]().union(*places)
    chosen = []
    while missing:
        number, values = max(numbered, key=lambda place: len(place[1] & missing))
        chosen.append(number)
        missing -= values
    return sorted(chosen)


def each_value(rows: Iterable[tuple[Any, ...]], turn: int = 0) -> list[int]:
    """The numbers of a few rows in which every value of every column occurs.

    Each ``turn`` begins with another row: in as many turns as there are rows, all of them are chosen.
    """
    return covering([frozenset(enumerate(row)) for row in rows], turn)


def each_pair(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A few rows, with a value of each column, in which every two values of two columns occur together."""
    rows = [*product(*columns)]
    pairs = [frozenset(combinations(enumerate(row), 2)) for row in rows]
    missing = set[Any]().union(*pairs)
    chosen = []
    while missing:
        number = max(range(len(rows)), key=lambda place: len(pairs[place] & missing))
        chosen.append(number)
        missing -= pairs[number]
    return [rows[number] for number in sorted(chosen)]


def rest_thorough(values: Iterable[Any], few: Container[Any]) -> list[Any]:
    """All values, of which those that are not among the few are marked."""
    marks = [pytest.mark.thorough]
    return [pytest.param(value, marks=() if value in few else marks) for value in values]


def statics_of(variant: Variant) -> Iterator[tuple[str, ...]]:
    """What each kernel of a family is to be tried with: its statics that are words, of which both dtypes of 16 bits are alike.
    Of numbers, which are sizes of tiles and the like, each value is to occur in one of the kernels."""
    for name, value in variant.statics:
        if isinstance(value, str):
            alike = "16 bits" if value in ("float16", "bfloat16") else value
            yield variant.kernel, name, alike


def values_of(item: pytest.Item) -> frozenset[object]:
    """What each ``parametrize``, and each fixture with parameters, has chosen for this test; and of a variant, each static."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    chosen = set[object]()
    for mark in item.iter_markers("parametrize"):
        names = (mark.args[0],) if isinstance(mark.args[0], str) else mark.args[0]
        values = {name: params.pop(name, None) for name in names}
        variants = [value for value in values.values() if isinstance(value, Variant)]
        if len(variants) == 1:  # and which of all it is says nothing
            values = {n: x for n, x in values.items() if n != "turn" and x is not variants[0]}
            chosen.update(variants[0].statics, statics_of(variants[0]))
        if values:
            chosen.add((*values, *map(id, values.values())))
    chosen.update((name, id(value)) for name, value in params.items())
    return frozenset(chosen)


def selection(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Without tests marked thorough; and of each other one so many combinations that all values of each parameter occur, and
    all of each static of the variants. A GPU gets all."""
    tests = dict[str, list[pytest.Item]]()
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            yield item
        elif item.get_closest_marker("thorough") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        several = len(cases) > 1
        yield from [cases[n] for n in covering([*map(values_of, cases)])] if several else cases
