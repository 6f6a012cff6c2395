"""``tools/recurrent_gemma.py``: what it times, on a small model on the CPU."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("recurrent_gemma")


def run(tool: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["recurrent_gemma", *map(str, arguments)])
    result: int = tool.main()
    return result


@pytest.mark.slow
def test_a_small_model(
    tool: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    record = tmp_path / "record.json"
    options = ("--device", "cpu", "--dtype", "float32", "--steps", 3, "--quick", "--json", record)
    assert run(tool, monkeypatch, *options) == 0
    found = json.loads(record.read_text(encoding="utf-8"))
    own, ours = found["losses"]["its own"], found["losses"]["scan_registry"]
    assert len(own) == tool.WARM_UP + 3
    assert own[-1] < own[0]
    assert own == pytest.approx(ours, rel=1e-5)
    assert [(each["what"], each["path"]) for each in found["runs"]] == [
        (what, path)
        for what in ("forward pass", "generated token, batch 1", "training step")
        for path in ("its own", "scan_registry")
    ]
    assert all(each["ms"] > 0 for each in found["runs"])
    assert f"first loss {own[0]:.6f}" in capsys.readouterr().out


def test_losses_that_differ_count_from_the_first(tool: Any) -> None:
    losses = {tool.OWN: [2.0, 1.0], tool.OURS: [2.0, 1.5]}
    assert tool.apart(losses, tool.OURS) == 0.25
    assert math.isinf(tool.apart(losses | {tool.OURS: [2.0, math.nan]}, tool.OURS))


def test_what_is_missing_is_named(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if importlib.util.find_spec("transformers") is not None:
        assert "torch sees no NVIDIA GPU" in tool.missing(torch.device("cuda"))
    assert run(tool, monkeypatch) == 2
