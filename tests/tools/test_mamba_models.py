"""``tools/mamba_models.py``: what it times, on a small model on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("mamba_models")


def run(tool: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["mamba_models", *map(str, arguments)])
    result: int = tool.main()
    return result


@pytest.mark.slow
def test_a_small_model(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool.missing():
        pytest.skip(tool.missing())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    record = tmp_path / "record.json"
    options = ("--device", "cpu", "--dtype", "float32", "--fused", "--quick", "--json", record)
    assert run(tool, monkeypatch, *options) == 0
    sys.modules.pop(tool.NAME, None)
    assert importlib.util.find_spec("mamba_ssm") is None
    found = json.loads(record.read_text(encoding="utf-8"))
    assert found["losses"]["its own"] == pytest.approx(found["losses"]["scan_registry"], rel=1e-5)
    assert [(each["what"], each["path"]) for each in found["runs"]] == [
        (what, path)
        for what in ("forward pass", "generated token, batch 1", "training step")
        for path in ("its own", "scan_registry", "fused")
    ]
    assert all(each["ms"] > 0 for each in found["runs"])


def test_an_original_leaves_nothing_to_time(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "causal_conv1d"):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert "causal_conv1d itself is installed" in (tool.missing() or "")
    assert run(tool, monkeypatch, "--device", "cpu") == 2
