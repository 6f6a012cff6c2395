"""``scan-registry bench`` on the CPU: what it prints, refuses and draws, and ``tools/bench.py``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from benching import ROOT, TINY, Capture, bench, document, refusal, schema

from scan_registry.bench import plot
from scan_registry.cli import main
from scan_registry.ops.operator import PASSES


def test_a_row_for_every_length_and_pass(capsys: Capture) -> None:
    out = bench(capsys, "--seqlens", "16,32")
    assert f"CPU, {torch.get_num_threads()} threads; streaming " in out
    rows = [line.split() for line in out.splitlines() if line.startswith("channel_last")]
    words = [" ".join(row[1:-4]) for row in rows]
    assert words == [
        f"2, 8, {length} bfloat16 {kernel}"
        for length in (16, 32)
        for kernel in (
            "forward scan-registry cpu",
            "forward torch.mul",
            "backward scan-registry cpu",
        )
    ]
    for row in rows:
        ms, spread, speed, share = map(float, row[-4:])
        assert ms > 0
        assert min(spread, speed, share) >= 0


def test_the_document(capsys: Capture) -> None:
    report = document(capsys, "--seqlens", "16, 32,16", "--dtype", "fp32", "--layout", "time_last")
    assert report["gpu"] is None
    assert report["torch"] == torch.__version__
    assert report["scan_registry"] == importlib.metadata.version("scan-registry")
    cases = [timing["case"] for timing in report["timings"]]
    assert cases[0] == {
        "layout": "time_last", "batch": 2, "channels": 8, "time": 16, "dtype": "float32"
    }  # fmt: skip
    who = [(t["case"]["time"], t["direction"], t["who"]) for t in report["timings"]]
    assert who == [
        (time, direction, who)
        for time in (16, 32)
        for direction, who in (
            ("forward", "scan-registry cpu"),
            ("forward", "torch.mul"),
            ("backward", "scan-registry cpu"),
        )
    ]
    for entry in report["timings"]:
        traffic = 2 * 8 * entry["case"]["time"] * 4 * (3 if entry["direction"] == "forward" else 5)
        roofline = traffic / report["streaming_bytes_per_ms"]
        assert entry["roofline_ms"] == pytest.approx(roofline)


def test_recorded_results_have_the_documents_form() -> None:
    recorded = sorted((ROOT / "tools" / "results").glob("*-bench.json"))
    assert recorded
    for path in recorded:
        jsonschema.Draft202012Validator(schema()).validate(
            json.loads(path.read_text(encoding="utf-8"))
        )


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "channels"], "--layout is 'channels'; accepted are channel_last, time_last"),
        (["--backend", "cpp"], "--backend is 'cpp'; accepted are auto, cuda, triton, reference"),
        (["--backend", "cuda"], "--backend is 'cuda', which needs a GPU; accepted on the CPU are"),
        (["--bs", "0"], "--bs is 0; accepted are whole numbers from 1 on"),
        (["--seqlens", "16,"], "--seqlens is '16,'; accepted are lengths such as 1024,2048"),
        (["--seqlens", str(2**60)], "is a tensor of more than 2**60 elements"),
        (["--plot", "no/such/x.png"], "--plot is 'no/such/x.png'; its folder does not exist"),
        (["--plot", "x.bmp"], "--plot is 'x.bmp'; accepted are files in pdf, png, svg"),
        (["--plot", ""], "a folder; it takes a file"),
        (["--budget", "nan"], "--budget is nan; accepted are seconds from 0 on"),
        (["--budget", "-1"], "--budget is -1.0; accepted are seconds from 0 on"),
        (["--only", "time"], "--only needs --targets, whose cases it chooses among"),
        (["--case", "time_last:8,16,32:bf61"], "whose dtype is 'bf61'; dtypes are float32, "),
        (["--case", "time_last:8,16,32:bf16:sequences=0"], "whose number of sequences is 0; acc"),
    ],
)
def test_arguments_that_cannot_be_meant(
    words: list[str], message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in refusal(capsys, "--device", "cpu", *words)


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cpu:0"])
def test_devices_that_are_not_here(name: str, capsys: Capture) -> None:
    assert f"--device is {name!r}; accepted here are cpu" in refusal(capsys, "--device", name)


def test_more_than_the_memory_holds(capsys: Capture) -> None:
    words = ("--bs", "1024", "--seqlens", f"16,{2**30}")
    message = refusal(capsys, "--device", "cpu", *words)
    assert f"--seqlens: T = {2**30} takes about " in message
    assert "GB are free on cpu" in message


@pytest.mark.usefixtures("untimed")
def test_without_matplotlib(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refusal(capsys, "--device", "cpu", "--plot-name", "x.png")
    assert "--plot: a plot needs matplotlib, which does not import here" in message
    assert "pip install 'scan-registry[plot]' brings it" in message


class Figure:
    """As much of matplotlib's as is used; remembers what is drawn, and writes it."""

    def __init__(self, **_: Any) -> None:
        self.panels: list[Any] = []

    def subplots(self, rows: int, columns: int, squeeze: bool) -> list[list[Any]]:
        assert (rows, squeeze) == (2, False)
        for _ in range(2 * columns):
            panel = types.SimpleNamespace(lines={}, title=None)
            panel.plot = lambda x, y, panel=panel, label=None, **_: panel.lines.update(
                {label: [x, y]}
            )
            panel.set = lambda panel=panel, title=None, **_: setattr(panel, "title", title)
            panel.get_legend_handles_labels = lambda panel=panel: ([], [*panel.lines])
            for name in ("set_xscale", "set_yscale", "set_ylim", "grid", "legend"):
                setattr(panel, name, lambda *_, **__: None)
            self.panels.append(panel)
        return [self.panels[:columns], self.panels[columns:]]

    def legend(self, handles: Any, labels: list[str], **_: Any) -> None:
        assert labels == [*self.panels[0].lines]

    def suptitle(self, text: str) -> None:
        self.title = text

    def savefig(self, path: Path) -> None:
        panels = {panel.title: panel.lines for panel in self.panels}
        path.write_text(json.dumps({"title": self.title, "panels": panels}), encoding="utf-8")


def test_a_line_for_everyone_and_the_roofline(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawing: Any = types.ModuleType("matplotlib.figure")
    drawing.Figure = Figure
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", drawing)
    report = document(capsys, "--seqlens", "32,16", "--plot_name", str(tmp_path / "out"))
    drawn = json.loads((tmp_path / "out.png").read_text(encoding="utf-8"))
    assert drawn["title"].endswith("threads: channel_last, 2 × 8, bfloat16")
    assert {name: [*lines] for name, lines in drawn["panels"].items()} == {
        "forward": ["scan-registry cpu", "torch.mul", "streaming"],
        "backward": ["scan-registry cpu", "streaming"],
        "forward, of the roofline": ["scan-registry cpu", "torch.mul"],
        "backward, of the roofline": ["scan-registry cpu"],
    }
    for entry in report["timings"]:
        times, ms = drawn["panels"][entry["direction"]][entry["who"]]
        assert times == [16, 32]
        assert entry["ms"] in ms
        times, shares = drawn["panels"][f"{entry['direction']}, of the roofline"][entry["who"]]
        assert times == [16, 32]
        assert entry["roofline_ms"] / entry["ms"] in shares


def test_a_picture_is_one(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    bench(capsys, "--seqlens", "16,32", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(plot, "load", lambda: None)
    monkeypatch.setattr(plot, "draw", full)
    words = (*TINY, "--seqlens", "16", "--fwd_only", "--plot", str(tmp_path / "x.svg"))
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert "torch.mul" in captured.out  # the numbers are there all the same
    assert f"--plot: {tmp_path / 'x.svg'} cannot be written: disk full" in captured.err


@pytest.mark.gpu
def test_on_a_gpu(capsys: Capture) -> None:
    words = ("--bs", "2", "--d_model", "64", "--seqlens", "128", "--no-baselines", "--json")
    assert main(["bench", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(report)
    assert report["gpu"] == torch.cuda.get_device_name()
    assert [(t["direction"], t["who"]) for t in report["timings"]] == [
        (direction, f"scan-registry {language}")
        for direction in PASSES
        for language in ("cuda", "triton")
    ]
    for entry in report["timings"]:
        assert entry["roofline"].startswith("roofline.stream:cuda:")
        assert entry["roofline_ms"] < 10 * entry["ms"]
