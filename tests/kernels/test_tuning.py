"""The nearest tuned problem: what is near, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scan_registry.kernels.tuning import Row, Shape, Tuning, nearest_arch

KIND = "dtype=float32"


def a_tuning(arch: str = "sm_90", *rows: Row, kind: str = KIND) -> Tuning:
    return Tuning.of(arch, "Imaginary", "2026-01-31", {kind: rows})


def at(time: float, lines: float = 1.0, **times: float) -> Row:
    return Row({"time": time, "lines": lines}, times or {"a": 1.0})


def test_distances_are_of_ratios() -> None:
    assert at(1024).distance(Shape(KIND, {"time": 4096, "lines": 1})) == 2.0
    assert at(1024).distance(Shape(KIND, {"time": 256, "lines": 1})) == 2.0
    assert at(1024, 8).distance(Shape(KIND, {"time": 8192, "lines": 128})) == 5.0
    assert math.isinf(at(1024).distance(Shape(KIND, {"time": 1024})))
    lighter = Shape(KIND, {"time": 4096, "lines": 2}, {"time": 0.5, "lines": 0.0})
    assert at(1024).distance(lighter) == 1.0


def test_the_nearest_row_wins_and_of_equals_the_first() -> None:
    rows = at(1024, a=1.0), at(4096, b=2.0), at(4096, c=3.0)
    tuning = a_tuning("sm_90", *rows)
    for time, expected in ((1, 0), (1500, 0), (2048, 0), (2100, 1), (10**9, 1)):
        found = tuning.nearest(Shape(KIND, {"time": time, "lines": 1.0}))
        assert found is not None
        assert found[1] == rows[expected]
    assert tuning.nearest(Shape("dtype=float64", {"time": 1, "lines": 1})) is None
    assert tuning.nearest(Shape(KIND, {"time": 1})) is None


@given(
    st.lists(st.tuples(st.integers(1, 2**40), st.integers(1, 2**40)), min_size=1, max_size=9),
    st.integers(1, 2**40),
)
def test_no_row_is_nearer_than_the_nearest(sizes: list[tuple[int, int]], time: int) -> None:
    tuning = a_tuning("sm_90", *(at(*each) for each in sizes))
    shape = Shape(KIND, {"time": time, "lines": 64})
    found = tuning.nearest(shape)
    assert found is not None
    assert found[0] == min(row.distance(shape) for row in tuning.rows(KIND))


def test_json_keeps_everything() -> None:
    rows = {KIND: [at(8, a=0.5, b=1.0), Row({"batches": 3}, {"c": 2})], "other": [at(1)]}
    tuning = Tuning.of("sm_120", "Imaginary", "2026-01-31", rows)
    again = Tuning.from_json(json.loads(json.dumps(asdict(tuning))))
    assert again == tuning
    assert {kind: [*again.rows(kind)] for kind in again.kinds} == rows
    assert again.capability == (12, 0)
    assert again.labels == ["a", "b", "c"]


@pytest.mark.parametrize(
    "change",
    [{"arch": "hopper"}, {"kinds": []}, {"names": "time"}, {"labels": [1]}, {"gpu": None},
     {"date": 3}, {"more": 1}, {"arch": 90}, {"names": [1]}, {"kinds": {KIND: []}}],
)  # fmt: skip
def test_what_is_no_tuning(change: dict[str, Any]) -> None:
    record = {**asdict(a_tuning("sm_90", at(1))), **change}
    with pytest.raises(ValueError, match=r"is not"):
        Tuning.from_json(record)
    for other in (None, 3, [], "x"):
        with pytest.raises(ValueError, match="is not a kernel's tuning"):
            Tuning.from_json(other)


@pytest.mark.parametrize(
    "rows",
    [3, [3], [[[1.0], [[0, 1.0]]]], [[[1.0, 0], [[0, 1.0]]]], [[[1.0, 1.0], [[7, 1.0]]]],
     [[[1.0, 1.0], [[0, -1.0]]]], [[[1.0, "x"], [[0, 1.0]]]], [[[1.0, 1.0], {"a": 1.0}]],
     [[[1.0, math.nan], [[0, 1.0]]]], [[[1.0, True], [[0, 1.0]]]], [[[0.5, 10**400], [[0, 1.0]]]],
     "", "[", "null", '["\\ud800"]', "[" * 100_000],
)  # fmt: skip
def test_rows_that_are_none_are_refused_when_they_are_needed(rows: Any) -> None:
    text = rows if isinstance(rows, str) else json.dumps(rows)
    record = {**asdict(a_tuning("sm_90", at(1))), "kinds": {KIND: text, "other": "[]"}}
    tuning = Tuning.from_json(record)
    assert tuning.nearest(Shape("other", {"time": 1, "lines": 1})) is None
    with pytest.raises(ValueError, match="the rows of a tuning"):
        tuning.nearest(Shape(KIND, {"time": 1, "lines": 1}))


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (("sm_80", "sm_90", "sm_100"), (9, 0), "sm_90"),
        (("sm_80", "sm_89", "sm_90"), (8, 6), "sm_80"),
        (("sm_86", "sm_89"), (8, 0), "sm_86"),
        (("sm_80", "sm_90"), (10, 0), "sm_90"),
        (("sm_90", "sm_120"), (10, 3), "sm_90"),
        (("sm_100", "sm_120"), (9, 0), "sm_100"),
        (("sm_103", "sm_90"), (10, 0), "sm_103"),
        ((), (9, 0), None),
    ],
)
def test_the_nearest_architecture(
    archs: tuple[str, ...], capability: tuple[int, int], expected: str | None
) -> None:
    tunings = [a_tuning(arch) for arch in archs]
    for order in (tunings, tunings[::-1]):
        found = nearest_arch(order, capability)
        assert (found.arch if found else None) == expected
