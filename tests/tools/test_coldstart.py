"""``tools/coldstart.py``: its processes, on the CPU, and its table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forked import captured


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load_tool("coldstart")
    monkeypatch.setattr(module, "FIRST_SHAPE", (1, 8, 128))
    monkeypatch.setattr(module, "CALLS", 2)
    return module


@pytest.mark.slow
def test_scans(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fork(script: str, arguments: Sequence[object], environment: Mapping[str, str]) -> Any:
        command = [sys.executable, "-c", script, *arguments]
        done = captured(command, cwd=tmp_path, env=environment, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    monkeypatch.setattr(tool, "fresh_process", fork)
    monkeypatch.setattr(tool, "ROUNDS", 2)
    monkeypatch.setattr(tool, "BASELINES", ())
    ours, scale = tool.measure_scans("cpu", 1)
    assert ours["cold"][0]["first_ms"] > 0
    assert len(ours["cold"]) == len(ours["warm"]) == 1
    assert len(ours["plain_us"]) == len(scale["tracked_us"])
    assert "import" in tool.summary(ours)
    assert "µs plain / with gradients" in tool.summary(scale)


@pytest.mark.slow
@pytest.mark.thorough
def test_networks(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each, whose answer stands for that of the one on the same caches, too: scans have both."""
    answers, start = dict[str, Any](), tool.fresh_process

    def once(script: str, arguments: Sequence[object], environment: Mapping[str, str]) -> Any:
        key = f"{script} {arguments}"
        if key not in answers:
            answers[key] = start(script, arguments, environment)
        return answers[key]

    monkeypatch.setattr(tool, "fresh_process", once)
    results = tool.measure_networks("cpu", 1)
    assert len(answers) == len(tool.NETWORKS)
    assert [result["name"] for result in results] == [*tool.NETWORKS]
    assert all(result["cold"][0]["backward_ms"] > 0 for result in results)
    assert "backward" in tool.summary(results[0])


def test_a_process_that_fails_says_why(tool: Any) -> None:
    with pytest.raises(tool.MeasurementError, match="no such thing"):
        tool.fresh_process("raise SystemExit('no such thing')", ["x"], {})
