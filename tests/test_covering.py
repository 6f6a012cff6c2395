"""Few combinations of values have all values, or all pairs of values, between them."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from covering import each_pair, each_value, selection

from scan_registry.kernels.model import Variant

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


def item(name: str, *marks: Any, **params: Any) -> Any:
    """As pytest collects a test."""
    call = {"callspec": SimpleNamespace(params=params)} if params else {}
    return SimpleNamespace(
        nodeid=f"{name}[{params}]",
        iter_markers=lambda of: [mark.mark for mark in marks if mark.name == of],
        get_closest_marker=lambda of: next((mark for mark in marks if mark.name == of), None),
        **call,
    )


def test_all_values_of_each_parameter_are_selected() -> None:
    """Those of one ``parametrize`` are one value; a parameter without is a fixture's."""
    sizes, dtype = pytest.mark.parametrize(("m", "n"), []), pytest.mark.parametrize("dtype", [])
    rows = [*product([(1, 2), (1, 3), (2, 3)], ["half", "single"], ["C", "Python"])]
    items = [item("a", sizes, dtype, m=m, n=n, dtype=d, way=w) for (m, n), d, w in rows]
    chosen = [rows[items.index(each)] for each in selection(items)]
    assert [len({*column}) for column in zip(*chosen, strict=True)] == [3, 2, 2]
    assert len(chosen) == 3


def test_what_has_one_parameter_or_needs_a_gpu_is_selected_whole() -> None:
    mark = pytest.mark.parametrize("n", [])
    items = [item("a"), *(item("b", mark, n=n) for n in range(5))]
    assert [*selection(items)] == items
    other = pytest.mark.parametrize("k", [])
    for_gpus = [
        item("c", mark, other, pytest.mark.gpu, n=n, k=k) for n, k in product("12", repeat=2)
    ]
    assert [*selection(for_gpus)] == for_gpus


def test_what_is_marked_thorough_is_not_selected() -> None:
    """Nor does it stand for the others' values."""
    n, k = pytest.mark.parametrize("n", []), pytest.mark.parametrize("k", [])
    left = item("a", n, k, pytest.mark.thorough, n=1, k=1)
    items = [left, item("a", n, k, n=1, k=2), item("a", n, k, n=2, k=1)]
    assert [*selection(items)] == items[1:]


def test_of_variants_all_statics_are_selected() -> None:
    """Whatever turn they have, and in whichever order a kernel lists its statics."""
    mark = pytest.mark.parametrize(("turn", "variant"), [])
    statics = [
        *(({"lanes": n, "dtype": d}) for n, d in product((1, 2), ("float32", "bfloat16"))),
        {"dtype": "float32", "lanes": 2, "warps": 4},
    ]
    items = [
        item("a", mark, turn=n, variant=Variant("linear_scan", kernel, "cuda", tuple(of.items())))
        for n, (kernel, of) in enumerate(product(("forward", "backward"), statics))
    ]
    assert len([*selection(items)]) == 4
