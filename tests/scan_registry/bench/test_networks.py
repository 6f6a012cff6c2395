"""``scan-registry bench rnn``: what it times, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scan_registry.bench import networks
from scan_registry.bench.networks import TARGETS, USUAL, Network, NetworkBench, NetworkTiming
from scan_registry.cli import bench_rnn, main
from scan_registry.ops.rnn_arguments import BACKENDS

Capture = pytest.CaptureFixture[str]
SMALL = ("bench", "rnn", "--device", "cpu", "--bs", "2", "--seqlen", "4")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


@pytest.mark.parametrize("function", ["lstm", "gru", "elman", "slstm"])
def test_a_table_of_times(function: str, capsys: Capture) -> None:
    assert main([*SMALL, "--case", f"{function}:1,8:float32"]) == 0
    out = capsys.readouterr().out
    assert "cpu; batch 2, 4 steps" in out
    rows = [line for line in out.splitlines() if line.startswith(function)]
    torchs = {"lstm": "torch.nn.LSTM", "gru": "torch.nn.GRU", "elman": "torch.nn.RNN"}
    expected = {"scan-registry"}
    if function in torchs:
        expected |= {torchs[function], f"scan_registry.{torchs[function][6:]}"}
    assert {word for word in " ".join(rows).split() if "." in word or "-reg" in word} >= expected
    assert len(rows) == 2 * len(expected)
    assert "1 × 8" in rows[0]


def test_several_heads_have_no_baseline_in_torch(capsys: Capture) -> None:
    assert main([*SMALL, "--case", "lstm:2,8:bfloat16", "--fwd_only", "--json"]) == 0
    (timing,) = json.loads(capsys.readouterr().out)["timings"]
    assert (timing["who"], timing["direction"]) == ("scan-registry", "forward")
    assert timing["target_ms"] is None
    assert timing["us_per_step"] == pytest.approx(1e3 * timing["ms"] / 4)


def test_who_cannot_be_timed_is_named(capsys: Capture) -> None:
    words = ["--case", "lstm:1,8:float32", "--no-baselines", "--backend", "cuda_fused"]
    assert main([*SMALL, *words, "--backend", "reference"]) == 0
    out = capsys.readouterr().out
    assert "not timed: scan-registry cuda_fused, lstm:1,8:float32: backend is 'cuda_fused'" in out
    assert "scan-registry reference" in out


def test_the_usual_networks_are_those_with_targets() -> None:
    assert {(case.function, case.heads, case.dim) for case in USUAL} == set(TARGETS)
    assert all(Network.parse(str(case)) == case for case in USUAL)
    assert bench_rnn.BACKENDS == BACKENDS


def test_targets_are_for_gpus_and_the_usual_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = NetworkBench(torch.device("cuda:0"))
    usual = Network("lstm", 1, 768)
    assert [bench._target(usual, direction) for direction in networks.PASSES] == [1.9, 5.8]
    for other in (
        Network("lstm", 2, 768),
        Network("lstm", 1, 768, "float32"),
        Network("lstm", 1, 768, batch=1),
    ):
        assert bench._target(other, "forward") is None
    assert NetworkBench(torch.device("cpu"))._target(usual, "forward") is None


def test_targets_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    bench = NetworkBench(torch.device("cpu"), sync_us=0.5)
    for ms in (1.0, 2.0):
        timing = NetworkTiming(Network("lstm", 1, 768), "forward", "scan-registry", ms, 0.1, 1.9)
        bench.timings.append(timing)
    bench_rnn.show_table(bench)
    out = capsys.readouterr().out
    assert "one synchronisation 0.50 µs" in out
    assert "1.9 met" in out
    assert "1.9 missed" in out


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
