"""``examples/character_model.py``: it trains and writes, and the record of the guide's picture is of such a run."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
from by_path import EXAMPLES, load

RECORD = Path(__file__).parents[2] / "tools" / "results" / "cpu-character-model.json"


def test_it_trains_and_any_terminal_shows_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has quotation marks and dashes that Latin-1 has not."""
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["x", "--device", "cpu", "--steps", "2", "--json", str(path)])
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="latin-1")):
        assert load(EXAMPLES / "character_model.py").main() == 0
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    for run, before in zip(
        runs, json.loads(RECORD.read_text(encoding="utf-8"))["runs"], strict=True
    ):
        assert run.keys() == before.keys()
        assert (run["network"], run["weights"]) == (before["network"], before["weights"])
        assert len(run["losses"]) == 2
        assert run["losses"] == pytest.approx(before["losses"][:2], abs=1e-3)


def test_the_record_is_of_two_models_that_learn() -> None:
    minimal, gru = json.loads(RECORD.read_text(encoding="utf-8"))["runs"]
    assert len(minimal["losses"]) == len(gru["losses"])
    for run in (minimal, gru):
        assert run["losses"][-1] < run["losses"][0] / 2
    assert abs(minimal["weights"] / gru["weights"] - 1) < 0.01
