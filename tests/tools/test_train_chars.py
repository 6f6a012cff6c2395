"""``tools/train_chars.py``: what it trains, and what it makes of a run before."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from scan_registry import nn


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("train_chars")


def test_plain_slstm_is_the_same_function(tool: Any) -> None:
    torch.manual_seed(0)
    size = {"input_size": 8, "hidden_size": 32, "num_layers": 2, "batch_first": True}
    plain, ours = (
        kind(**size, num_heads=4, dtype=torch.float64) for kind in (tool.PlainSLSTM, nn.SLSTM)
    )
    ours.load_state_dict(plain.state_dict())
    x = 3 * torch.randn(5, 20, 8, dtype=torch.float64)
    outs = [module(x)[0] for module in (plain, ours)]
    torch.testing.assert_close(*outs)
    grads = [
        torch.autograd.grad(out.square().sum(), [*module.parameters()])
        for out, module in zip(outs, (plain, ours), strict=True)
    ]
    torch.testing.assert_close(*grads)


def test_plain_mamba_is_the_same_function(tool: Any) -> None:
    torch.manual_seed(0)
    plain, ours = (kind(16).double() for kind in (tool.PlainMamba, nn.Mamba))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(3, 20, 16, dtype=torch.float64)
    outs = [module(x) for module in (plain, ours)]
    torch.testing.assert_close(*outs)
    grads = [
        torch.autograd.grad(out.square().sum(), [*module.parameters()])
        for out, module in zip(outs, (plain, ours), strict=True)
    ]
    torch.testing.assert_close(*grads)


def run(tool: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["train_chars", *map(str, arguments)])
    result: int = tool.main()
    return result


def test_a_run_before(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "record.json"
    runs = [
        {"model": "LSTM", "name": name, "losses": losses, "ms": 1.0}
        for name, losses in (("torch.nn", [4.0, 3.0]), ("scan_registry.nn", [4.0, 3.001]))
    ]
    record.write_text(json.dumps({"device": "NVIDIA H200", "runs": runs}), encoding="utf-8")
    assert run(tool, monkeypatch, "--from", record) == 0
    runs[1]["losses"] = [4.0, 3.1]
    record.write_text(json.dumps({"device": "NVIDIA H200", "runs": runs}), encoding="utf-8")
    assert run(tool, monkeypatch, "--from", record) == 1
    pytest.importorskip("matplotlib")
    picture = tmp_path / "losses.png"
    assert run(tool, monkeypatch, "--from", record, "--plot", picture) == 1
    assert picture.stat().st_size


def test_training(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCH": 2, "TIME": 4, "WIDTH": 16, "HEADS": 2}.items():
        monkeypatch.setattr(tool, name, value)
    record = tmp_path / "record.json"
    assert run(tool, monkeypatch, "--device", "cpu", "--steps", 3, "--json", record) == 0
    found = json.loads(record.read_text(encoding="utf-8"))["runs"]
    assert [len(each["losses"]) for each in found] == [3] * 6
    assert [each["model"] for each in found] == [
        name for name in ("LSTM", "sLSTM", "Mamba") for _ in range(2)
    ]
