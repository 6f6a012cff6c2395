"""``examples/transformers_models.py``: small models on the CPU. ``compat/test_transformers.py`` has the other ones of Mamba-2."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from by_path import EXAMPLES, load

#: As mamba_ssm's own module, but that it counts calls and computes by the stand-in.
SCANS = """
import functools
from causal_conv1d import causal_conv1d_fn
from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function
from scan_registry.compat.mamba_ssm.ops import triton

CALLS = []

def counted(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        CALLS.append(function.__name__)
        return function(*args, **kwargs)
    return call

mamba_chunk_scan_combined = counted(triton.ssd_combined.mamba_chunk_scan_combined)
mamba_split_conv1d_scan_combined = counted(triton.ssd_combined.mamba_split_conv1d_scan_combined)
selective_state_update = counted(triton.selective_state_update.selective_state_update)
"""


def run(model: str, record: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Any:
    """What the example measured."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(record.parent))
    options = ("--device", "cpu", "--dtype", "float32", "--repeats", "1", "--quick", "--json", str(record))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["transformers_models", model, *options, *more])
    finders = [*sys.meta_path]
    assert load(EXAMPLES / "transformers_models.py").main() == 0
    assert sys.meta_path == finders
    sys.modules.pop(f"transformers.models.{model}.modeling_{model}", None)
    return json.loads(record.read_text(encoding="utf-8"))


def check_runs(record: Any, paths: list[str]) -> None:
    """That each path has a time of each kind."""
    batch = 64 if record["model"] in ("mamba", "recurrent_gemma") else 8
    tokens = [f"generated token, batch {n}" for n in (1, batch)]
    kinds = ["first training step", "training step", "forward pass", *tokens]
    assert [(row["what"], row["path"]) for row in record["runs"]] == [
        (kind, path) for kind in kinds for path in paths
    ]
    assert all(row["ms"] > 0 for row in record["runs"])
    assert [*record["losses"]] == paths


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        *("mamba", "recurrent_gemma"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("mamba2", "nemotron_h")),
    ],
)
def test_losses_agree(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(model, tmp_path / "record.json", monkeypatch)
    assert importlib.util.find_spec("mamba_ssm") is None
    check_runs(record, ["its own", "scan_registry"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba", "mamba2"])
def test_steps_of_each_path_are_timed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run(model, tmp_path / "record.json", monkeypatch, "--graphs", "eager")
    both, alone = ("scan_registry", "scan_registry.nn"), ("scan_registry.nn",)
    kinds = {"training step, eager": both, "generated token, eager": both}
    kinds["both passes of a block, limited by the CPU"] = alone
    assert [(row["what"], row["path"]) for row in record["runs"]] == [
        (kind, path) for kind, paths in kinds.items() for path in paths
    ]
    assert all(row["ms"] > 0 for row in record["runs"])


@pytest.mark.parametrize("words", ["mamba --graphs", "mamba --graphs graph", "jamba"])
def test_what_a_cpu_cannot_time_is_refused(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["transformers_models", *words.split(), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="2"):
        load(EXAMPLES / "transformers_models.py").main()


@pytest.mark.slow
@pytest.mark.thorough
def test_an_installed_mamba_ssm_is_a_third_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the stand-in's convolution, as causal-conv1d is not installed. The other paths do not see it."""
    scans, metadata = tmp_path / "mamba_ssm" / "ops" / "triton", tmp_path / "mamba_ssm-2.2.6.post3.dist-info"  # fmt: skip
    scans.mkdir(parents=True)
    for folder in (scans, *scans.parents[:2]):
        (folder / "__init__.py").touch()
    (scans / "ssd_combined.py").write_text(SCANS, encoding="utf-8")
    text = "from mamba_ssm.ops.triton.ssd_combined import selective_state_update"
    (scans / "selective_state_update.py").write_text(text, encoding="utf-8")
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: mamba-ssm\nVersion: 2.2.6.post3\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        record = run("mamba2", tmp_path / "record.json", monkeypatch)
        calls = sys.modules["mamba_ssm.ops.triton.ssd_combined"].CALLS
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
            del sys.modules[name]
    check_runs(record, ["its own", "mamba_ssm", "scan_registry"])
    assert importlib.util.find_spec("causal_conv1d") is None
    assert record["mamba_ssm"] == "2.2.6.post3"
    assert record["causal_conv1d"].endswith("+scan.registry")
    assert "with scan_registry's causal_conv1d" in capsys.readouterr().out
    # Two layers in three training steps and two forward passes; in prompts of two batches, twice each, and 31 tokens after each.
    layers = 2
    assert calls.count("mamba_split_conv1d_scan_combined") == 5 * layers
    assert calls.count("mamba_chunk_scan_combined") == 4 * layers
    assert calls.count("selective_state_update") == 4 * 31 * layers
