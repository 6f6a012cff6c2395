"""``scan-registry bench rnn``: what it times, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scan_registry.bench.measure import Bench
from scan_registry.cli import bench as command
from scan_registry.cli import main, parser
from scan_registry.kernels.rnn.op.arguments import BACKENDS
from scan_registry.kernels.rnn.op.bench import BENCHMARK, PASSES, TARGETS, Network
from scan_registry.kernels.rnn.op.operator import OPERATOR
from scan_registry.ops.benchmark import Timing

Capture = pytest.CaptureFixture[str]
SMALL = ("bench", "rnn", "--device", "cpu", "--bs", "2", "--seqlens", "4")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


@pytest.mark.parametrize("function", ["lstm", "gru", "elman", "slstm"])
def test_a_table_of_times(function: str, capsys: Capture) -> None:
    assert main([*SMALL, "--case", f"{function}:1,8:float32"]) == 0
    out = capsys.readouterr().out
    assert "threads; batch 2, 4 steps" in out
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
    assert (
        "not everywhere timed: scan-registry cuda_fused, lstm:1,8:float32: backend is 'cuda_fused'"
        in out
    )
    assert "scan-registry reference" in out


def test_the_usual_networks_are_those_with_targets() -> None:
    usual = BENCHMARK.cases(parser().parse_args(["bench", "rnn"]), "cpu")
    assert {(case.function, case.heads, case.dim) for case in usual} == set(TARGETS)
    assert all(Network.parse(str(case)) == case for case in usual)
    assert OPERATOR.backends == BACKENDS


def test_targets_are_for_gpus_and_the_usual_sizes() -> None:
    def target_ms(case: Network, direction: str = "forward", kind: str = "cuda") -> float | None:
        return BENCHMARK.target_ms(Timing(case, direction, "scan-registry", 1.0, 0.1), kind)

    usual = Network("lstm", 1, 768)
    assert [target_ms(usual, direction) for direction in PASSES] == [1.9, 5.8]
    for other in (
        Network("lstm", 2, 768),
        Network("lstm", 1, 768, "float32"),
        Network("lstm", 1, 768, batch=1),
    ):
        assert target_ms(other) is None
    assert target_ms(usual, kind="cpu") is None
    theirs = Timing(usual, "forward", "torch.nn.LSTM", 1.0, 0.1)
    assert BENCHMARK.target_ms(theirs, "cuda") is None


def test_targets_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    bench = Bench(BENCHMARK, torch.device("cuda:0"), ("auto",), (), PASSES)
    bench.facts["sync_us"] = 0.5
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary")
    for ms in (1.0, 2.0):
        bench.timings.append(Timing(Network("lstm", 1, 768), "forward", "scan-registry", ms, 0.1))
    command.show_table(bench)
    out = capsys.readouterr().out
    assert "Imaginary; batch 16, 1024 steps; one synchronisation 0.50 µs" in out
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


def test_several_lengths_and_short_names_of_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL[:-2], "--seqlens", "3,4", "--fwd_only", "--no-baselines", "--json"]
    assert main([*words, "--case", "lstm:1,16:fp32"]) == 0
    cases = [timing["network"] for timing in json.loads(capsys.readouterr().out)["timings"]]
    assert [(case["time"], case["dtype"]) for case in cases] == [(3, "float32"), (4, "float32")]
    assert main([*words, "--seqlens", "3,x"]) == 2
    assert "--seqlens is '3,x'; accepted are lengths" in capsys.readouterr().err
