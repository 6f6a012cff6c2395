"""``examples/transformers_models.py``: small models on the CPU. ``compat/test_transformers.py`` has the other ones of Mamba-2."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from by_path import EXAMPLES, load


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba", "recurrent_gemma", "mamba2", "nemotron_h"])
def test_losses_agree(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    record = tmp_path / "record.json"
    options = ("--device", "cpu", "--dtype", "float32", "--repeats", "1", "--quick", "--json", str(record))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["transformers_models", model, *options])
    assert load(EXAMPLES / "transformers_models.py").main() == 0
    sys.modules.pop(f"transformers.models.{model}.modeling_{model}", None)
    assert importlib.util.find_spec("mamba_ssm") is None
    runs = json.loads(record.read_text(encoding="utf-8"))["runs"]
    assert [*runs] == ["forward pass", *(f"generated token, batch {n}" for n in (1, 64)), "training step"]  # fmt: skip
    assert all(ms > 0 for times in runs.values() for ms in times.values())
