"""``tools/race.py``: threads that run networks and scans at the same time do not disturb one another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> Any:
    return load_tool("race")


def test_threads_do_not_disturb_one_another(tool: Any) -> None:
    race, _ = tool.run(1, 4, "cpu")
    assert race.problems == []
    assert race.rounds


@pytest.mark.slow
def test_differences_are_found(tool: Any) -> None:
    race = tool.make_race(2, "cpu")
    race.expected[0][5][1] += 1
    threading.Timer(0.5, race.stop.set).start()
    tool.run_thread(race, 1, None)
    assert race.problems == []
    race.stop.clear()
    threading.Timer(0.5, race.stop.set).start()
    tool.run_thread(race, 0, None)
    assert race.problems[0] == "thread 0, job 5: 1 off"


def test_errors_are_found(tool: Any) -> None:
    race = tool.make_race(1, "cpu")
    race.jobs[2] = lambda x: torch.zeros(2) @ torch.zeros(3)
    tool.run_thread(race, 0, None)
    (problem,) = race.problems
    assert problem.startswith("thread 0: RuntimeError")


@pytest.mark.gpu
def test_threads_do_not_disturb_one_another_on_a_gpu(tool: Any) -> None:
    race, used = tool.run(5, 8, "cuda")
    assert race.problems == []
    *early, after = used
    assert after <= max(early) + tool.SLACK
