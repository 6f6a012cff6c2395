"""``tools/coldstart.py``: its processes, on the CPU, and its table."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from scan_registry.ops.linear_scan_baselines import OURS


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load_tool("coldstart")
    monkeypatch.setattr(module, "FIRST_SHAPE", (1, 8, 128))
    monkeypatch.setattr(module, "CALLS", 2)
    return module


def printed(tool: Any, results: list[Any]) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(tool.table(results))
    return capture.get()


@pytest.mark.slow
def test_scans(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tool.measure_start(OURS, "cpu", 1)
    assert result.cold[0].first_ms > 0
    assert len(result.cold) == len(result.warm) == 1
    calls = tool.measure_calls([OURS], "cpu", 2)
    assert {name for name, _ in calls} == {OURS.name, tool.SCALE}
    assert all(len(values) == 2 for values in calls.values())
    assert "first backward" not in printed(tool, [result])


@pytest.mark.slow
def test_networks(tool: Any) -> None:
    results = tool.measure_networks("cpu", 1)
    assert [result.name for result in results] == [*tool.NETWORKS]
    assert all(result.cold[0].backward_ms > 0 for result in results)
    assert "first backward" in printed(tool, results)


def test_a_process_that_fails_says_why(tool: Any) -> None:
    with pytest.raises(tool.MeasurementError, match="no such thing"):
        tool.fresh_process("raise SystemExit('no such thing')", ["x"], {})
