"""``scan-registry bench rnn``: what it times, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scan_registry.cli import main

Capture = pytest.CaptureFixture[str]
SMALL = ("bench", "rnn", "--device", "cpu", "--bs", "2", "--seqlens", "4")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


@pytest.mark.parametrize("function", ["lstm", "slstm"])
def test_a_table_of_times(function: str, capsys: Capture) -> None:
    assert main([*SMALL, "--case", f"{function}:1,8:float32"]) == 0
    out = capsys.readouterr().out
    assert "threads; batch 2, 4 steps" in out
    rows = [line for line in out.splitlines() if line.startswith(function)]
    expected = {"scan-registry"}
    if function == "lstm":
        expected |= {"torch.nn.LSTM", "scan_registry.nn.LSTM"}
    assert {word for word in " ".join(rows).split() if "." in word or "-reg" in word} >= expected
    assert len(rows) == 2 * len(expected)
    assert "1 × 8" in rows[0]


def test_who_cannot_be_timed_is_named(capsys: Capture) -> None:
    words = ["--case", "lstm:1,8:float32", "--no-baselines", "--backend", "cuda_fused"]
    assert main([*SMALL, *words, "--backend", "reference"]) == 0
    out = capsys.readouterr().out
    assert (
        "not everywhere timed: scan-registry cuda_fused, lstm:1,8:float32: backend is 'cuda_fused'"
        in out
    )
    assert "scan-registry reference" in out


def test_a_picture(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "networks.svg"
    assert main([*SMALL, "--case", "lstm:1,8:float32", "--plot", str(path)]) == 0
    assert "torch.nn.LSTM" in path.read_text(encoding="utf-8")
    assert f"wrote {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--case", "lstm:768"], "expected cell:heads,units:dtype"),
        (["--case", "rwkv:1,8:float32"], "cells are lstm, gru, elman, slstm"),
        (["--bs", "0"], "--bs is 0; accepted are whole numbers from 1 on"),
        (["--backend", "cudnn"], "--backend is 'cudnn'; accepted are auto"),
        (["--device", "tpu"], "--device is 'tpu'; accepted here are cpu"),
        (["--plot", "times.gif"], "accepted are files in pdf, png, svg"),
    ],
)
def test_errors(words: list[str], said: str, capsys: Capture) -> None:
    assert main(["bench", "rnn", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err


def test_several_lengths_and_short_names_of_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL[:-2], "--seqlens", "3,4", "--fwd_only", "--no-baselines", "--json"]
    assert main([*words, "--case", "lstm:1,16:fp32"]) == 0
    cases = [timing["network"] for timing in json.loads(capsys.readouterr().out)["timings"]]
    assert [(case["time"], case["dtype"]) for case in cases] == [(3, "float32"), (4, "float32")]
    assert main([*words, "--seqlens", "3,x"]) == 2
    assert "--seqlens is '3,x'; accepted are lengths" in capsys.readouterr().err
