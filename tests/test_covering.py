"""Few combinations of values have all values, or all pairs of values, between them."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from covering import each_pair, each_value

COLUMNS = (("a", "b", "c", "d"), (1, 2, 3), (False, True), (None, 0.5, 2.0))


@pytest.mark.parametrize("turn", range(5))
def test_each_value_occurs(turn: int) -> None:
    rows = [*product(*COLUMNS)]
    chosen = [rows[number] for number in each_value(rows, turn)]
    assert len(chosen) <= 6
    assert [set(column) for column in zip(*chosen, strict=True)] == [*map(set, COLUMNS)]


def test_turns_choose_every_row() -> None:
    rows = [*product(*COLUMNS[:2])]
    assert {row for turn in range(len(rows)) for row in each_value(rows, turn)} == {*range(12)}
    assert each_value([]) == []


def test_each_pair_occurs() -> None:
    chosen = each_pair(*COLUMNS)
    assert len(chosen) <= 16 < len([*product(*COLUMNS)])
    for one, other in combinations(range(len(COLUMNS)), 2):
        pairs = {(row[one], row[other]) for row in chosen}
        assert pairs == {*product(COLUMNS[one], COLUMNS[other])}
