"""Tuning tables: what a file keeps, and which few variants it takes to serve all of its problems."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scan_registry.kernels import families
from scan_registry.kernels import tables as table_module
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.tables import (
    EQUAL,
    Measured,
    Run,
    Table,
    Timing,
    forget_reduced,
    leave_reduced,
    shipped,
    tables,
    timed,
)
from scan_registry.kernels.tuning import Shape, few, fewest, needed, worthwhile

RUN = Run("Imaginary", "580.1", {"sm": 1980}, {"cuda": "nvrtc 12.9.86"}, "9.9.9", "2026-01-31")
HEAD = "a_family.a_kernel:cuda"
SOURCES = Path(__file__).parents[2] / "kernels" / FAMILY.name


def measured(time: int, kernel: str = HEAD, run: Run = RUN, **ms: float) -> Measured:
    timings = {label: Timing(each, 0.1 * each, 11) for label, each in ms.items()}
    return Measured(kernel, f"T {time}", Shape("kind", {"time": time}), timings, run)


def a_table(*each: Measured) -> Table:
    return Table("a_family", "sm_90").with_newer(each)


def written(folder: Path, table: Table, name: str = "sm90.json") -> Path:
    path = folder / table.family / "tuning" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.text(), encoding="utf-8")
    return path


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    other = replace(RUN, date="2026-02-01", clocks={"sm": 1000, "memory": 2000})
    table = a_table(measured(8, a=1.0, b=2.0), measured(16, run=other, c=3.0))
    path = written(tmp_path, table)
    assert Table.read(path) == table
    assert (
        len(path.read_text(encoding="utf-8").splitlines()) == 13
    )  # a line for each run and each problem
    assert tables(tmp_path / "a_family") == (table,)
    (tuning,) = shipped(tmp_path / "a_family", HEAD)
    assert (tuning.arch, tuning.date) == ("sm_90", "2026-02-01")
    assert shipped(tmp_path / "a_family", "a_family.other:cuda") == ()
    assert tables(tmp_path / "b_family") == ()


def test_a_gpu_may_have_a_table_for_itself(tmp_path: Path) -> None:
    written(tmp_path, a_table(measured(8, a=1.0, b=2.0)))
    run = replace(RUN, gpu="NVIDIA Other")
    own = replace(a_table(measured(8, run=run, a=2.0, b=1.0)), exclusive=True)
    path = written(tmp_path, own, "sm90-other.json")
    assert Table.read(path) == own
    gpus = (RUN.gpu, run.gpu)
    found = {tuning.gpu: tuning for tuning in shipped(tmp_path / "a_family", HEAD)}
    assert [[found[each].serves(gpu) for gpu in gpus] for each in gpus] == [
        [True, True],
        [False, True],
    ]
    mixed = replace(own, measured=(*own.measured, measured(16, a=1.0)))
    with pytest.raises(
        ValueError, match="for one GPU, and was measured on NVIDIA Other, Imaginary"
    ):
        Table.read(written(tmp_path, mixed, "sm90-other.json"))


def test_the_gpus_of_an_architecture_share_variants(tmp_path: Path) -> None:
    """``both`` is nowhere the fastest, and near it everywhere; ``dear`` is 40 percent faster on many problems."""
    run = replace(RUN, gpu="NVIDIA Other")

    def found(own: Measured, *others: Measured) -> list[dict[str, float]]:
        tables.cache_clear()
        timed.cache_clear()
        shipped.cache_clear()
        written(tmp_path, a_table(own))
        alone = replace(a_table(*(replace(each, run=run) for each in others)), exclusive=True)
        written(tmp_path, alone, "sm90-other.json")
        tunings = sorted(shipped(tmp_path / "a_family", HEAD), key=lambda each: each.exclusive)
        assert [tuning.exclusive for tuning in tunings] == [False, True]
        return [row.times for tuning in tunings for row in tuning.rows("kind")]

    general = measured(8, a=1.0, both=1.05, dear=9.0)
    assert found(general, measured(8, b=1.0, both=1.05)) == [{"both": 1.05}] * 2
    few = measured(8, a=2.0, b=1.0, both=1.05, dear=1.0)
    assert found(general, few) == [{"both": 1.05}] * 2
    many = [measured(2**n, both=1.0, dear=0.93) for n in range(8)]
    assert found(general, *many) == [
        {"both": 1.05, "dear": 9.0},
        *[{"dear": 0.93, "both": 1.0}] * 8,
    ]


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10.0), min_size=1), max_size=8
    ),
    st.sets(st.sampled_from("abcdef")),
)
def test_nothing_else_would_be_worth_a_place(times: list[dict[str, float]], held: set[str]) -> None:
    kept = worthwhile(times, held, 0.1)
    assert held <= kept
    assert kept == worthwhile(times, kept, 0.1)
    for each in times:
        assert kept & each.keys()
    for label in {label for each in times for label in each} - kept:
        gains = (
            math.log(min(ms for name, ms in each.items() if name in kept) / each[label])
            for each in times
            if label in each
        )
        assert sum(gain for gain in gains if gain > 0) < 0.1


def test_what_a_build_leaves_is_read_instead_of_the_tables(tmp_path: Path) -> None:
    folder, head = tmp_path / "a_family", HEAD
    path = written(tmp_path, a_table(measured(8, a=1.0, b=2.0)))
    found = shipped(folder, head)
    leave_reduced(folder, head, found)
    path.write_text("not read", encoding="utf-8")
    shipped.cache_clear()
    assert shipped(folder, head) == found
    forget_reduced(folder)
    with pytest.raises(ValueError, match=r"sm90\.json"):
        shipped(folder, head)


def test_what_is_installed_for_the_jit_is_what_the_tables_reduce_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuned = [kernel for kernel in FAMILY.kernels if kernel.tunable.shape is not None]
    places = [table_module._reduced_file(FAMILY.folder, kernel.head) for kernel in tuned]
    assert all(place.is_file() for place in places)
    left = [kernel.tunable.tunings() for kernel in tuned]
    assert any(left)
    # Wheels hold neither tables nor timing models, which the reduced tunings have with them.
    assert any(each.model for each in chain.from_iterable(left))
    monkeypatch.setattr(table_module, "_reduced_file", lambda *_: tmp_path / "none.json")
    shipped.cache_clear()
    try:
        assert [shipped(SOURCES, kernel.head) for kernel in tuned] == left
    finally:
        shipped.cache_clear()


def test_what_labels_have_in_common_with_the_kind_is_written_once(tmp_path: Path) -> None:
    timings = {"kind,warps=4": Timing(1.0, 0.1, 11), "kinder,warps=4": Timing(2.0, 0.1, 3)}
    table = a_table(replace(measured(8, a=1.0), timings=timings))
    path = written(tmp_path, table)
    (record,) = json.loads(path.read_text(encoding="utf-8"))["measured"]
    assert [*record["ms_spread_rounds"]] == [",warps=4", "kinder,warps=4"]
    assert Table.read(path) == table


def test_newer_measurements_replace_older_ones() -> None:
    table = a_table(measured(8, a=1.0), measured(16, a=1.0))
    other = measured(8, kernel="a_family.a_kernel:triton", a=7.0)
    newer = table.with_newer([measured(8, b=2.0), other])
    assert {each.place for each in newer.measured} == {each.place for each in table.measured} | {
        other.place
    }
    assert newer.tunings()[HEAD].rows("kind")[0].times == {"b": 2.0}


def test_times_of_variants_that_were_not_to_be_timed_stay() -> None:
    table = a_table(measured(8, a=1.0, b=3.0, c=2.0))
    (row,) = table.with_newer([measured(8, b=1.5)], lambda name: name != f"{HEAD}:a").measured
    assert {label: time.ms for label, time in row.timings.items()} == {"a": 1.0, "b": 1.5}


def test_rows_name_the_fastest_first() -> None:
    table = a_table(measured(8, a=3.0, b=1.0), measured(16, a=1.0, b=2.0), measured(32, c=1.0))
    rows = table.tunings()[HEAD].rows("kind")
    assert [[*row.times] for row in rows] == [["b", "a"], ["a", "b"], ["c"]]


def test_random_problems_count_where_others_stand_in(tmp_path: Path) -> None:
    written(tmp_path, a_table(measured(8, a=1.0, b=1.1), measured(16, a=1.09, b=1.0)))
    models = tmp_path / "a_family" / "tuning" / "models"
    models.mkdir()
    for times, label in (({"c": 1.0}, "a"), ({"a": 1.2, "b": 1.0}, "b")):
        points = [{"kernel": HEAD, "kind": "kind", "ms": times}]
        (models / "sm90-random-1-x.json").write_text(
            json.dumps({"points": points}), encoding="utf-8"
        )
        forget_reduced(tmp_path / "a_family")
        (tuning,) = shipped(tmp_path / "a_family", HEAD)
        assert tuning.labels == [label]


def test_what_others_can_stand_in_for_is_left_out() -> None:
    problems = [{"a": 1.0, "b": 1.1}, {"a": 1.0, "b": 1.1, "c": 0.9}, {"b": 1.0, "c": 1.05}]
    every = {"a", "b", "c"}
    assert needed(problems, every, 1.0, 1.0) == every
    assert needed(problems, every, 1.06, 0.04) == every
    assert needed(problems, every, 1.06, 0.06) == {"a", "c"}
    assert needed(problems[:2], every, 1.1, 0.2) == {"a", "c"}
    assert needed(problems[:1], every, 1.12, 0.2) == {"a"}
    assert needed([{"a": 1.0}], {"a"}, 9.0, 9.0) == {"a"}


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10.0), min_size=1), max_size=8
    )
)
def test_what_is_needed_serves_each_problem(times: list[dict[str, float]]) -> None:
    kept = needed(times, set("abcdef"), 1.5, math.inf)
    for each in times:
        assert min(ms for name, ms in each.items() if name in kept) <= 1.5 * min(each.values())


def test_rows_have_times_in_four_digits_and_are_in_order_by_all_of_them() -> None:
    table = a_table(measured(8, a=0.123456, b=0.123454), measured(16, a=2.0, b=1.0))
    rows = table.timed()[HEAD].rows("kind")
    assert [list(row.times.items()) for row in rows] == [
        [("b", 0.1235), ("a", 0.1235)],
        [("b", 1.0), ("a", 2.0)],
    ]


def test_few_variants_serve_all() -> None:
    problems = [{"a": 1.0, "all": EQUAL}, {"b": 1.0, "all": 1.01}, {"c": 1.0, "all": 1.5}]
    assert fewest(problems, EQUAL) == ("all", "c")
    assert fewest([], EQUAL) == ()
    assert fewest(problems, 1.5) == ("all",)
    assert few(problems, 1.5, 0.4) == {"all", "c"}
    assert few(problems, 1.5, 0.5) == {"all"}


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10.0), min_size=1), max_size=8
    )
)
def test_each_problem_has_a_variant_that_is_as_good_as_its_best(
    times: list[dict[str, float]],
) -> None:
    chosen = fewest(times, EQUAL)
    for each in times:
        taken = [each[label] for label in chosen if label in each]
        assert min(taken) <= EQUAL * min(each.values())
    assert chosen == fewest(times, EQUAL)
    assert len(set(chosen)) == len(chosen) <= len(times)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 9}, "schema 9; this version reads 1"),
        ({"arch": "hopper"}, "'hopper' is not a GPU's architecture"),
        ({"runs": []}, "it is not a tuning table"),
        ({"measured": [{}]}, "it is not a tuning table"),
        ({"family": "b_family"}, "it is of b_family for sm_90"),
        ({"arch": "sm_80"}, "it is of a_family for sm_80"),
    ],
)
def test_files_that_are_none(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path, a_table(measured(8, a=1.0)))
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **change}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=message) as caught:
        Table.read(path)
    assert str(path) in str(caught.value)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="sm90"):
        tables(tmp_path / "a_family")


def test_times_that_are_none(tmp_path: Path) -> None:
    path = written(tmp_path, a_table(measured(8, a=1.0)))
    path.write_text(
        path.read_text(encoding="utf-8").replace("[1.0, 0.1, 11]", "[-1.0, 0.1, 11]"),
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match=r"-1\.0 is not a positive number"):
        Table.read(path)


def test_the_repositorys_own_tables_are_right() -> None:
    """Every variant that a table names is one that there can be."""
    found = 0
    for family in families().values():
        for table in tables(SOURCES.parent / family.name):
            found += 1
            for head, tuning in table.tunings().items():
                name, language = head.split(".")[1].split(":")
                kernel = next(k for k in family.kernels if (k.name, k.language) == (name, language))
                assert set(tuning.labels) <= {kernel.label(variant) for variant in kernel.every}
    assert found
