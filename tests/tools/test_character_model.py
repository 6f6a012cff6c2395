"""``tools/character_model.py``: it trains the models of the page, and its record is what the page's picture needs."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

RECORD = Path(__file__).parents[2] / "tools" / "results" / "cpu-character-model.json"


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("character_model")


def test_the_pages_models_are_trained(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asks = tmp_path / "record.json", torch.cuda.is_available
    arguments = ["character_model", "--device", "cpu", "--steps", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert tool.main() == 0
    assert torch.cuda.is_available is asks
    found = json.loads(path.read_text(encoding="utf-8"))
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert found["device"] == recorded["device"] == "CPU"
    for run, before in zip(found["runs"], recorded["runs"], strict=True):
        assert run.keys() == before.keys()
        assert run["network"] == before["network"]
        assert len(run["losses"]) == 1


def test_the_record_is_of_two_models_that_learn() -> None:
    minimal, gru = json.loads(RECORD.read_text(encoding="utf-8"))["runs"]
    assert len(minimal["losses"]) == len(gru["losses"])
    for run in (minimal, gru):
        assert run["losses"][-1] < run["losses"][0] / 2
    assert abs(minimal["weights"] / gru["weights"] - 1) < 0.01


def test_blocks_that_are_skipped_are_left_out(tool: Any) -> None:
    program = tool.program()
    assert "train(model, steps=3)" in program
    assert "losses +=" not in program
    assert "python tools/" not in program


def test_any_terminal_shows_what_is_written(tool: Any) -> None:
    """The data have quotation marks and dashes that Latin-1 has not."""
    _, after = tool.program().split("    return made\n")
    prints, _, _ = after.partition("class GRUBlock")
    assert "print(" in prints
    names = {"write": lambda *_: "The “ ", "model": None}
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="latin-1")) as shown:
        exec(compile(prints, "page", "exec"), names)
        shown.flush()
    assert shown.buffer.getvalue().split() == [b"The", b"?"]
