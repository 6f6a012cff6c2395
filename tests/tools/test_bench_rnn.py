"""``tools/bench_rnn.py``, on the CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> Any:
    return load_tool("bench_rnn")


def test_it_times_every_case_and_writes_them(
    tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, threads = tmp_path / "times.json", torch.get_num_threads()
    try:
        assert tool.main(
            ["--steps=1,3", "--batches=2", "--units=8", "--budget=0.1", "--json", str(file)]
        ) == 0  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    found = json.loads(file.read_text())
    assert found["facts"]["dtype"] == "float32"
    named = {(row["kind"], row["steps"], row["what"]) for row in found["rows"]}
    assert len(found["rows"]) == len(named) == 8
    assert all(
        row["ratio"] == pytest.approx(row["ours_us"] / row["theirs_us"]) for row in found["rows"]
    )
    assert "8 ratios, geometric mean" in capsys.readouterr().out


def test_all_sizes_of_both_kinds_are_timed_by_default(tool: Any) -> None:
    assert len(tool.cases_of(tool.arguments([]))) == 2 * 36 * 2
    few = tool.cases_of(tool.arguments(["--largest", "512"]))
    assert few
    assert max(case.steps * case.batch * case.units for case in few) == 512


def test_a_time_is_that_of_one_call(tool: Any) -> None:
    short, long = (
        min(rounds)
        for rounds in tool.timed(
            [lambda: time.sleep(1e-3), lambda: time.sleep(4e-3)], time.perf_counter, 0.1
        )
    )
    assert short == pytest.approx(1e-3, rel=0.5)
    assert long == pytest.approx(4e-3, rel=0.5)


def test_modules_are_the_same_network(tool: Any) -> None:
    for what in tool.PASSES:
        case = tool.Case("GRU", 3, 2, 8, what)
        ours, theirs = (call() for call in tool.calls_of(case, "cpu", torch.float64))
        torch.testing.assert_close(ours, theirs)


def test_the_summary_has_the_mean_the_worst_and_the_slow(tool: Any) -> None:
    of = {"kind": "GRU", "steps": 1, "batch": 1, "what": "forward", "theirs_us": 1.0}
    rows = [of | {"units": k, "ours_us": r, "ratio": r} for k, r in ((1, 0.5), (2, 2), (3, 1.04))]
    total, slow, *listed = tool.said(rows)
    assert total == "3 ratios, geometric mean of the speed-up 0.987, worst ratio 2.000"
    assert slow == "1 slower than 1.05"
    assert len(listed) == 1
    assert "D 2 " in listed[0]
