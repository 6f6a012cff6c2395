"""``tools/coldstart_rnn.py``: its processes, on the CPU, and what it holds against them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("coldstart_rnn")


@pytest.mark.parametrize("name", ["scan_registry.rnn", "scan_registry.nn.LSTM"])
def test_a_process(tool: Any, name: str) -> None:
    found = tool.measure(name, "cpu", 1)
    assert set(found.runs[0]) == set(tool.COLUMNS)
    assert found.median("forward") > 0
    assert found.defects(float("inf")) == []
    tool.table([found], tool.SHAPES["cpu"])


def test_defects(tool: Any) -> None:
    def measured(name: str, *ms: float, left: tuple[str, ...] = ()) -> Any:
        return tool.Measured(name, tuple({"forward": each} for each in ms), left)

    assert measured("scan_registry.rnn", 99.0, 20.0, 21.0).defects(30.0) == []
    (slow,) = measured("scan_registry.rnn", 20.0, 31.0, 99.0).defects(30.0)
    assert "31.0 ms > 30" in slow
    (compiled,) = measured("scan_registry.rnn", 1.0, left=("made.scanreg",)).defects(30.0)
    assert "made.scanreg" in compiled
    assert measured("torch.nn.LSTM", 99.0).defects(30.0) == []
