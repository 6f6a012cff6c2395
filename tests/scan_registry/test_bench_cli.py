"""``scan-registry bench`` on the CPU, the measuring under it, and ``tools/bench.py``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from scan_registry.bench import floor, goals, measure, plot, timing
from scan_registry.bench.cases import PASSES, Case
from scan_registry.bench.measure import Bench, Timing, our_call
from scan_registry.bench.peers import (
    COMPLEX,
    OURS,
    PEERS,
    SCALAR,
    SEQUENTIAL_CUDA,
    SEQUENTIAL_TRITON,
    TIMED,
    WARP,
    Peer,
    installed,
)
from scan_registry.cli import bench as command
from scan_registry.cli import main
from scan_registry.select import NoKernelError

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = ("--device", "cpu", "--bs", "2", "--d_model", "8")
SMALL = Case("channel_last", 2, 8, 16, "float32")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small cache to be out of, and short turns."""
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 14)
    monkeypatch.setattr(timing, "LEAST_STREAMED", 1 << 16)
    monkeypatch.setattr(timing, "ENOUGH_MS", 0.2)
    monkeypatch.setenv("COLUMNS", "120")


def schema() -> Any:
    return json.loads(files("scan_registry").joinpath("schemas", "bench.json").read_text())


def bench(capsys: Capture, *words: str) -> str:
    assert main(["bench", *TINY, *words]) == 0
    captured = capsys.readouterr()
    assert "timing" not in captured.err  # no progress where nobody watches
    return captured.out


def document(capsys: Capture, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench(capsys, "--json", *words))
    jsonschema.Draft202012Validator(schema()).validate(found)
    return found


def refusal(capsys: Capture, *words: str) -> str:
    """What it says on stderr when it refuses, having printed nothing else."""
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


# --- The command ------------------------------------------------------------------------------


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
    found = document(capsys, "--seqlens", "16, 32,16", "--dtype", "fp32", "--layout", "time_last")
    assert found["gpu"] is None
    assert found["torch"] == torch.__version__
    assert found["scan_registry"] == importlib.metadata.version("scan-registry")
    cases = [timing["case"] for timing in found["timings"]]
    assert cases[0] == {
        "layout": "time_last", "batch": 2, "channels": 8, "time": 16, "dtype": "float32"
    }  # fmt: skip
    who = [(t["case"]["time"], t["direction"], t["who"]) for t in found["timings"]]
    assert who == [
        (time, direction, who)
        for time in (16, 32)
        for direction, who in (
            ("forward", "scan-registry cpu"),
            ("forward", "torch.mul"),
            ("backward", "scan-registry cpu"),
        )
    ]
    for entry in found["timings"]:
        traffic = 2 * 8 * entry["case"]["time"] * 4 * (3 if entry["direction"] == "forward" else 5)
        floor = traffic / found["streaming_bytes_per_ms"]
        assert entry["floor_ms"] == pytest.approx(floor)


@pytest.mark.parametrize("spelling", ["--fwd_only", "--fwd-only"])
def test_the_forward_pass_alone(spelling: str, capsys: Capture) -> None:
    found = document(capsys, "--seqlens", "16", spelling, "--d-model", "4")
    assert {(t["direction"], t["case"]["channels"]) for t in found["timings"]} == {("forward", 4)}


@pytest.mark.parametrize("dtype", ["fp16", "float64", "complex64"])
def test_every_dtype(dtype: str, capsys: Capture) -> None:
    found = document(capsys, "--seqlens", "16", "--dtype", dtype)
    assert {t["case"]["dtype"] for t in found["timings"]} == {command.DTYPES[dtype]}
    assert len(found["timings"]) == 3


def test_the_reference(capsys: Capture) -> None:
    found = document(capsys, "--seqlens", "16", "--backend", "reference", "--fwd_only")
    assert [t["who"] for t in found["timings"]] == ["scan-registry reference", "torch.mul"]


def test_the_lengths_that_are_usual_depend_on_the_device() -> None:
    lengths = {kind: [*map(int, text.split(","))] for kind, text in command.SEQLENS.items()}
    assert lengths["cuda"] == [128, 256, 1024, 2048, 4096, 8192, 16384, 32768]
    assert max(lengths["cpu"]) < max(lengths["cuda"])


def test_recorded_results_have_the_documents_form() -> None:
    recorded = sorted((ROOT / "tools" / "results").glob("*-bench.json"))
    assert recorded
    for path in recorded:
        jsonschema.Draft202012Validator(schema()).validate(json.loads(path.read_text()))


# --- What it refuses --------------------------------------------------------------------------


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals come before anything is timed."""
    monkeypatch.setattr(measure, "streaming_bandwidth", lambda device: pytest.fail("timed"))


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "channels"], "--layout is 'channels'; accepted are channel_last, time_last"),
        (["--dtype", "int8"], "--dtype is 'int8'; accepted are float32, fp32, "),
        (["--backend", "cpp"], "--backend is 'cpp'; accepted are auto, cuda, triton, reference"),
        (["--backend", "cuda"], "--backend is 'cuda', which needs a GPU; accepted on the CPU are"),
        (["--bs", "0"], "--bs is 0; accepted are whole numbers from 1 on"),
        (["--d_model", "-3"], "--d_model is -3; accepted are whole numbers from 1 on"),
        (["--seqlens", "16,"], "--seqlens is '16,'; accepted are lengths such as 1024,2048"),
        (["--seqlens", "0"], "--seqlens is '0'; accepted are lengths such as"),
        (["--seqlens", "1e3"], "--seqlens is '1e3'; accepted are lengths such as"),
        (["--seqlens", "9" * 5000], "accepted are lengths such as 1024,2048"),
        (["--seqlens", str(2**60)], "is a tensor of more than 2**60 elements"),
        (["--plot", "no/such/x.png"], "--plot is 'no/such/x.png'; its folder does not exist"),
        (["--plot", "x.bmp"], "--plot is 'x.bmp'; accepted are files in pdf, png, svg"),
        (["--plot", "/"], "--plot is '/', a folder; it takes a file"),
        (["--plot", ""], "a folder; it takes a file"),
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


def test_sizes_that_are_no_numbers(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--bs", "many"])
    assert stopped.value.code == 2
    assert "--bs: invalid int value: 'many'" in capsys.readouterr().err


# --- The picture ------------------------------------------------------------------------------


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("spelling", ["--plot", "--plot_name", "--plot-name"])
def test_without_matplotlib(
    spelling: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refusal(capsys, "--device", "cpu", spelling, "x.png")
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
        path.write_text(json.dumps({"title": self.title, "panels": panels}))


def test_a_line_for_everyone_and_the_floor(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawing: Any = types.ModuleType("matplotlib.figure")
    drawing.Figure = Figure
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", drawing)
    found = document(capsys, "--seqlens", "32,16", "--plot_name", str(tmp_path / "out"))
    drawn = json.loads((tmp_path / "out.png").read_text())
    assert drawn["title"].endswith("threads: channel_last, B 2, C 8, bfloat16")
    assert {name: [*lines] for name, lines in drawn["panels"].items()} == {
        "forward": ["scan-registry cpu", "torch.mul", "streaming"],
        "backward": ["scan-registry cpu", "streaming"],
        "forward, of the floor": ["scan-registry cpu", "torch.mul"],
        "backward, of the floor": ["scan-registry cpu"],
    }
    for entry in found["timings"]:
        times, ms = drawn["panels"][entry["direction"]][entry["who"]]
        assert times == [16, 32]
        assert entry["ms"] in ms
        times, shares = drawn["panels"][f"{entry['direction']}, of the floor"][entry["who"]]
        assert times == [16, 32]
        assert entry["floor_ms"] / entry["ms"] in shares


def test_cases_of_several_kinds_have_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawing: Any = types.ModuleType("matplotlib.figure")
    drawing.Figure = Figure
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", drawing)
    cases = [SMALL, replace(SMALL, time=32), replace(SMALL, gates="channel")]
    timings = [Timing(case, "forward", "us", 2.0, 0.1, 1.0) for case in cases]
    plot.draw(timings, "all", tmp_path / "out.png")
    drawn = json.loads((tmp_path / "out.png").read_text())
    assert drawn["panels"]["forward, of the floor"] == {
        "channel_last, 2 × 8, float32, us": [[16, 32], [0.5, 0.5]],
        "channel_last, 2 × 8, a gate per channel, float32, us": [[16], [0.5]],
    }


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


# --- Measuring --------------------------------------------------------------------------------


def test_recordings_take_turns() -> None:
    """The warm-up does not count; of the rest the median and the spread do."""
    order: list[str] = []

    class Scripted:
        def __init__(self, name: str, scale: float) -> None:
            self.name, self.times = (
                name,
                iter([1e9] * timing.WARM_UP + [scale * n for n in range(11)]),
            )

        def ms(self) -> float:
            order.append(self.name)
            return next(self.times)

    assert timing.ROUNDS == 11
    found = timing.compete([Scripted("a", 1.0), Scripted("b", 2.0)])
    assert found == [(5.0, 10.0), (10.0, 20.0)]
    assert order == ["a", "b"] * (timing.WARM_UP + timing.ROUNDS)


def test_the_wall_clock_counts_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    now = iter([10.0, 10.6])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    clock = timing.WallClock(2, [lambda: made.append("a"), lambda: made.append("b")])
    assert clock.ms() == pytest.approx(150)
    assert made == ["a", "b", "a", "b"]


class Stream:
    """What torch.cuda's graphs and events do, in order; every call takes a millisecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.captured, self.capturing = 0.0, 0, False

        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = stream.now

            def synchronize(self) -> None:
                assert self.at == stream.now

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Graph:
            def capture_begin(self) -> None:
                stream.capturing = True

            def capture_end(self) -> None:
                stream.capturing = False

            def replay(self) -> None:
                stream.now += stream.captured

        for name, value in {
            "Event": Event, "CUDAGraph": Graph, "Stream": lambda: None, "stream": nullcontext,
            "synchronize": lambda: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def call(self) -> None:
        if self.capturing:
            self.captured += 1
        else:
            self.now += 1.0


@pytest.mark.parametrize(("sets", "launches"), [(1, 12), (5, 15), (20, 20)])
def test_a_graph_records_a_dozen_launches_at_least(
    sets: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(monkeypatch)
    recording = timing.record([stream.call] * sets, torch.device("cuda:0"))
    assert isinstance(recording, timing.Graph)
    assert stream.captured == recording.launches == launches
    before = stream.now
    assert recording.ms() == 1.0
    assert stream.now - before == launches


@pytest.mark.parametrize(("sets", "launches"), [(1, 3), (2, 4), (5, 5)])
def test_a_graph_records_as_many_launches_as_are_asked_for(
    sets: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(monkeypatch)
    recording = timing.record([stream.call] * sets, torch.device("cuda:0"), launches=3)
    assert isinstance(recording, timing.Graph)
    assert stream.captured == recording.launches == launches
    (found,) = timing.compete([recording], warm_up=1, rounds=2)
    assert found == (1.0, 0.0)


@pytest.mark.parametrize(
    ("sets", "enough", "turns"), [(1, 5.0, 5), (1, 50.0, 12), (3, 50.0, 4), (3, 0, 1)]
)
def test_what_no_graph_records_is_launched(
    sets: int, enough: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "ENOUGH_MS", enough)
    stream = Stream(monkeypatch)
    recording = timing.record([stream.call] * sets, torch.device("cuda:0"), captured=False)
    assert isinstance(recording, timing.Launches)
    assert (recording.turns, stream.captured) == (turns, 0)
    before = stream.now
    assert recording.ms() == 1.0
    assert stream.now - before == turns * sets


@pytest.mark.parametrize(
    ("traffic", "sets"), [(1, 64), (1 << 10, 48), (1 << 14, 3), (3 << 14, 1), (1 << 40, 1)]
)
def test_inputs_fill_the_cache_three_times(traffic: int, sets: int) -> None:
    assert timing.sets_of_inputs(traffic, CPU) == sets


@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_case_moves_what_its_tensors_hold(layout: str, dtype: str) -> None:
    case = Case.parse(f"{layout}:2,3,5:{dtype}")
    tensors = case.random_gates(CPU), case.sequence(CPU), case.sequence(CPU)
    assert {t.shape for t in tensors} == {torch.Size(case.shape)}
    assert case.shape[case.dim] == 5
    assert case.traffic("forward") == sum(t.numel() * t.element_size() for t in tensors)
    assert 3 * case.traffic("backward") == 5 * case.traffic("forward")
    shared = replace(case, gates="channel")
    assert shared.random_gates(CPU).numel() == 3
    assert shared.moves("forward") == (1, 1)
    assert shared.moves("backward") == (2, 1)
    assert Case.parse(str(shared)) == shared
    assert Case(**shared.to_json()) == shared
    assert Case(**case.to_json()) == case
    assert bool((tensors[0].abs() <= 1).all())


@pytest.mark.parametrize(
    "text", ["", "time_last:1,2:float32", "rows:1,2,3:float32", "time_last:1,2,3:int8",
             "time_last:1,0,3:float32", "time_last:1,x,3:float32", "time_last:1,2,3:float32:packed",
     "time_last:1,2,3:float32:sequences=-1", "time_last:1,2,3:float32:gates=none",
     "time_last:1,2,3:float32:sequences=x", "time_last:1,2,3:float32:more=1"]
)  # fmt: skip
def test_cases_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="the case is "):
        Case.parse(text)


def test_packed_sequences_fill_the_time_and_are_the_same_each_time() -> None:
    case = Case("channel_last", 1, 8, 1000, "bfloat16", sequences=64)
    bounds = case.bounds(CPU)
    assert bounds is not None
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 1000, 65)
    assert bool((bounds.diff() >= 0).all())
    again = case.bounds(CPU)
    assert again is not None
    assert bounds.equal(again)
    assert SMALL.bounds(CPU) is None
    assert Case.parse(str(case)) == case
    assert case.options == "64 packed sequences"


@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize("options", [{}, {"gates": "channel"}, {"sequences": 3}])
def test_what_is_timed_is_the_scan(
    layout: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both calls compute what the operator and autograd do."""
    case = Case(layout, 2, 3, 20, "float64", **options)
    gates, tokens = case.random_gates(CPU).requires_grad_(), case.sequence(CPU).requires_grad_()
    monkeypatch.setattr(Case, "random_gates", lambda self, device: gates.detach())
    monkeypatch.setattr(Case, "sequence", lambda self, device: tokens.detach())
    states = measure.linear_scan(gates, tokens, dim=case.dim, cu_seqlens=case.bounds(CPU))
    torch.testing.assert_close(our_call(case, "forward", "auto", CPU)(), states.detach())
    expected = torch.autograd.grad(states, (gates, tokens), tokens.detach())
    for_gates, for_tokens, for_initial = our_call(case, "backward", "auto", CPU)()
    torch.testing.assert_close((for_gates, for_tokens), expected)
    assert for_initial is None


def test_no_kernel_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise NoKernelError("nothing fits")

    monkeypatch.setattr(measure, "our_call", none)
    with pytest.raises(NoKernelError, match="nothing fits"):
        Bench.on(CPU).run(SMALL)


def test_one_language_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(case: Case, direction: str, backend: str, device: Any) -> Any:
        if backend == "auto":
            raise NoKernelError("nothing fits")
        return lambda: None

    monkeypatch.setattr(measure, "our_call", some)
    here = Bench.on(CPU, ("auto", "reference"))
    here.run(SMALL)
    assert {t.who for t in here.timings} == {"scan-registry reference", "torch.mul"}
    assert here.skipped == {"scan-registry cpu": "nothing fits"}


# --- The floor and the goals ------------------------------------------------------------------


class Launches:
    """What preparing a stream kernel and starting it is, on this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, set[str], int]] = []
        monkeypatch.setattr(floor.loader, "prepare", self.prepare)
        monkeypatch.setattr(floor.check, "start", self.start)

    def prepare(self, ordinal: int, family: Any, problem: Any, *others: Any) -> Any:
        assert family.kernels[0].accepts(others[-1], problem) is None
        return types.SimpleNamespace(launch=str(others[-1]), workspace=0)

    def start(self, ordinal: int, launch: Any, kernel: Any, case: Any, workspace: int) -> None:
        assert set(case.tensors) <= set(kernel.pointers)
        (size,) = {tensor.numel() for tensor in case.tensors.values()}
        self.started.append((launch, set(case.tensors), size))


def test_the_floor_streams_as_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    found = dict(floor.stream_calls(2, 1, 4001, 3, CPU))
    assert len(found) > 1
    for name, calls in found.items():
        assert len(calls) == 3
        calls[0]()
        assert launches.started.pop() == (name, {"a", "b", "sum"}, 1001)


def test_the_fastest_stream_is_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Bench.on(CPU)

    def scripted(recordings: Any) -> Any:
        return [(10.0, 1.0), (20.0, 1.0), (8.0, 0.5), (7.0, 0.5)]

    monkeypatch.setattr(measure, "compete", scripted)
    monkeypatch.setattr(Bench, "_floors", lambda *_: {"slow": None, "fast": None})
    here.passes = ("forward",)
    here.run(SMALL)
    assert [(t.who, t.ms, t.floor_ms, t.floor) for t in here.timings] == [
        ("scan-registry cpu", 10.0, 7.0, "fast"),
        ("torch.mul", 20.0, 7.0, "fast"),
    ]
    jsonschema.Draft202012Validator(schema()).validate(here.document())


def test_goals_are_of_cases_that_can_be_named() -> None:
    assert len({goal.case for goal in goals.GOALS}) == len(goals.GOALS) > 100
    for goal in goals.GOALS:
        assert Case.parse(str(goal.case)) == goal.case
        assert 0.8 <= goal.ratio <= 0.95
    ratio = {str(goal.case): goal.ratio for goal in goals.GOALS}
    assert ratio["time_last:8,1536,65536:float16"] == 0.95
    assert ratio["channel_last:8,1536,32768:bfloat16"] == 0.95
    assert ratio["channel_last:1,1024,1048576:bfloat16:sequences=64"] == 0.88
    assert ratio["channel_last:8,1024,8192:bfloat16:gates=channel"] == 0.90


def on_cpu(monkeypatch: pytest.MonkeyPatch, *few: goals.Goal) -> None:
    """Few goals, on a CPU that says it is a GPU; it has a floor of its own."""
    monkeypatch.setattr(goals, "GOALS", few)
    on, device = Bench.on, types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(command, "_device", lambda name: device)
    monkeypatch.setattr(Bench, "on", lambda _, backends, **options: on(CPU, backends, **options))


def test_goals_are_met_or_missed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Case("channel_last", 1, 8, 64, "float32", sequences=3)
    easy, hard = goals.Goal(SMALL, 1e-9), goals.Goal(packed, 1e9)
    on_cpu(monkeypatch, easy, hard)
    assert main(["bench", "--goals"]) == 1
    out = capsys.readouterr().out
    assert "2 of 4 goals met, 4 timed" in out
    assert "1, 8, 64, 3 packed sequences" in out
    assert main(["bench", "--goals", "--only", "2,8,16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(found)
    assert [(each["direction"], each["target"], each["met"]) for each in found["goals"]] == [
        (direction, 1e-9, True) for direction in PASSES
    ]
    ours = [entry for entry in found["timings"] if entry["who"] != "torch.mul"]
    for each, entry in zip(found["goals"], ours, strict=True):
        assert each["case"] == entry["case"]
        assert each["ratio"] == entry["floor_ms"] / entry["ms"]


def test_what_is_not_timed_is_no_goal_met(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(SMALL, time=32)
    on_cpu(monkeypatch, goals.Goal(SMALL, 1e-9), goals.Goal(other, 1e-9))
    assert main(["bench", "--goals", "--budget", "-1"]) == 1
    out = capsys.readouterr().out
    assert "0 of 4 goals met, 0 timed" in out
    assert f"not everywhere timed: {other}: not begun in time" in out
    run = Bench.run

    def failing(self: Bench, case: Case) -> None:
        if case == SMALL:
            raise torch.OutOfMemoryError("too large")
        run(self, case)

    monkeypatch.setattr(Bench, "run", failing)
    assert main(["bench", "--goals"]) == 1
    out = capsys.readouterr().out
    assert "2 of 4 goals met, 2 timed" in out
    assert f"not everywhere timed: {SMALL}: too large" in out

    def interrupted(self: Bench, case: Case) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "run", interrupted)
    assert main(["bench", "--goals"]) == 1
    assert "interrupted: what was timed is kept" in capsys.readouterr().err


def test_goals_need_a_gpu_and_a_case(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--goals are for GPUs" in refusal(capsys, "--device", "cpu", "--goals")
    on_cpu(monkeypatch, goals.Goal(SMALL, 1e-9))
    assert "--only 'nothing' leaves no case" in refusal(capsys, "--goals", "--only", "nothing")


def test_cases_by_name(capsys: Capture) -> None:
    name = "channel_last:2,8,16:float32:gates=channel"
    found = document(
        capsys, "--case", name, "--case", "time_last:1,2,3:fp64".replace("fp", "float")
    )
    assert found["timings"][0]["case"]["gates"] == "channel"
    assert {t["case"]["layout"] for t in found["timings"]} == {"channel_last", "time_last"}
    assert "--case: the case is 'x'" in refusal(capsys, "--device", "cpu", "--case", "x")


def test_peers_take_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Bench.on(CPU)
    here.peers = (Peer("plain", "x", "a_peer", "scan", lambda *_: pytest.fail("asked")),)
    here.run(replace(SMALL, gates="channel"))
    assert here.skipped == {"plain": "it does not take a gate per channel"}


# --- Peers ------------------------------------------------------------------------------------


def test_the_cpu_has_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "installed", lambda: pytest.fail("looked for"))
    assert Bench.on(CPU).peers == ()


def test_peers_are_timed_where_they_take_the_case(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One is, one refuses one case, one does not import and one does not run, which are tried once;
    what the import prints does not get among the results."""
    module: Any = types.ModuleType("a_peer")
    module.passes = []
    monkeypatch.setitem(sys.modules, "a_peer", module)

    def kernel(module: Any, direction: str, *tensors: Any) -> Any:
        assert {(*t.shape,) for t in tensors} in ({(2, 16, 8)}, {(2, 32, 8)})
        return lambda: module.passes.append(direction)

    tried: list[str] = []

    class Broken(Peer):
        def kernel_call(self, *_: Any) -> Any:
            tried.append(self.name)
            print("compiling")
            os.write(1, b"compiling, too\n")
            raise OSError("no compiler")

    def failing(*_: Any) -> Any:
        def launch() -> None:
            tried.append("failing")
            raise RuntimeError("no such instruction")

        return launch

    peers = (
        Peer("fits", "x", "a_peer", "scan", kernel),
        Peer("failing", "x", "a_peer", "scan", failing),
        Peer(
            "picky", "x", "a_peer", "scan", kernel, lambda c: "too short" if c.time < 32 else None
        ),
        Broken("broken", "x", "a_peer", "scan", kernel),
    )
    here = Bench.on(CPU)
    here.peers = peers
    longer = Case("channel_last", 2, 8, 32, "float32")
    here.run(SMALL)
    here.run(longer)
    who = {(t.case.time, t.direction, t.who) for t in here.timings}
    assert {(16, direction, "fits") for direction in PASSES} <= who
    assert {(32, direction, "picky") for direction in PASSES} <= who
    assert (16, "forward", "picky") not in who
    assert set(module.passes) == set(PASSES)
    assert sorted(tried) == ["broken", "failing"]
    assert here.document()["skipped"] == here.skipped
    assert here.skipped == {
        "picky": "too short",
        "broken": "OSError: no compiler",
        "failing": "RuntimeError: no such instruction",
    }
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "compiling\n" in captured.err
    assert "compiling, too\n" in captured.err
    command.show_table(here)
    out = capfd.readouterr().out
    assert "not everywhere timed: picky: too short" in out
    assert "not everywhere timed: broken: OSError: no compiler" in out


@pytest.mark.parametrize(
    ("peer", "text", "reason"),
    [
        (SCALAR, "time_last:1,8,100:float16", None),
        (SCALAR, "time_last:1,8,100:float64", "dtype is float64"),
        (SCALAR, "channel_last:1,8,100:float32", "layout is channel_last"),
        (SCALAR, "time_last:1,65536,100:float32", "65536 channels"),
        (WARP, "time_last:1,8,128:bfloat16", None),
        (WARP, "time_last:1,8,100:float32", "time is 100"),
        (WARP, "time_last:1,8,4096:bfloat16", "wrong in 16 bits"),
        (COMPLEX, "time_last:1,8,100:complex64", None),
        (COMPLEX, "time_last:1,8,100:float32", "dtype is float32"),
        (SEQUENTIAL_CUDA, "channel_last:1,768,3:bfloat16", None),
        (SEQUENTIAL_CUDA, "channel_last:1,768,2:bfloat16", "time is 2"),
        (SEQUENTIAL_CUDA, "channel_last:1,100,8:float32", "100 channels"),
        (SEQUENTIAL_CUDA, "channel_last:1,512,8:float16", "dtype is float16"),
        (SEQUENTIAL_TRITON, "channel_last:1,100,8:bfloat16", None),
        (SEQUENTIAL_TRITON, "channel_last:1,100,1:bfloat16", "time is 1"),
        (SEQUENTIAL_TRITON, "time_last:1,100,8:bfloat16", "layout is time_last"),
    ],
)
def test_what_peers_refuse(peer: Peer, text: str, reason: str | None) -> None:
    found = peer.refuses(Case.parse(text))
    assert found is None if reason is None else reason in (found or "")
    if reason is not None:
        assert peer.kernel_call(Case.parse(text), "forward", CPU) is None


def test_peers_are_the_installed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"accelerated-scan": "0.3.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed() == [SCALAR, WARP, COMPLEX]
    versions.clear()
    assert installed() == []
    assert len({peer.name for peer in TIMED}) == len(TIMED)
    assert set(PEERS) < set(TIMED)
    assert OURS not in TIMED
    assert OURS.load() is measure.linear_scan


def test_kernels_of_peers_are_called_as_they_are_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins with their signatures: every pass of every peer gets its tensors."""
    calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def noted(name: str) -> Any:
        def function(*tensors: Any, **_: Any) -> None:
            calls.append((name, [tuple(t.shape) for t in tensors if isinstance(t, torch.Tensor)]))

        return function

    class Launched(dict[Any, Any]):
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            assert tuple(grid) == (2, 8)
            return noted(self.name)

    names = {
        "accelerated_scan.scalar": {n: Launched(n) for n in ("forward_scan", "backward_scan")},
        "accelerated_scan.complex": {n: Launched(n) for n in ("forward_scan", "backward_scan")},
        "accelerated_scan.warp": {n: noted(n) for n in ("warpscan_forward", "warpscan_backward")},
        "sequential_scan_cuda": {
            n: noted(n)
            for n in ("scan_forward", "scan_backward", "scan_forward_half", "scan_backward_half")
        },
        "sequential_scan.kernels": {
            n: noted(n) for n in ("sequential_scan_forward", "sequential_scan_backward")
        },
    }
    for name, functions in names.items():
        module: Any = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    time_last, wide = (2, 8, 32), (2, 32, 512)
    for peer, text, forward, backward, shape in [
        (SCALAR, "time_last:2,8,32:float32", ("forward_scan", 3), ("backward_scan", 5), time_last),
        (COMPLEX, "time_last:2,8,32:complex64", ("forward_scan", 3), ("backward_scan", 5),
         (*time_last, 2)),
        (WARP, "time_last:2,8,32:float16", ("warpscan_forward", 3), ("warpscan_backward", 5),
         time_last),
        (SEQUENTIAL_CUDA, "channel_last:2,512,32:float32", ("scan_forward", 2),
         ("scan_backward", 3), wide),
        (SEQUENTIAL_CUDA, "channel_last:2,512,32:bfloat16", ("scan_forward_half", 2),
         ("scan_backward_half", 3), wide),
        (SEQUENTIAL_TRITON, "channel_last:2,512,32:bfloat16", ("sequential_scan_forward", 2),
         ("sequential_scan_backward", 3), wide),
    ]:  # fmt: skip
        for direction, (name, count) in (("forward", forward), ("backward", backward)):
            make = peer.kernel_call(Case.parse(text), direction, CPU)
            assert make is not None
            make()()
            assert calls.pop() == (name, [shape] * count)
    assert not calls


# --- The tool ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("bench_tool", ROOT / "tools" / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tools_cases_are_those_of_the_recorded_results(tool: types.ModuleType) -> None:
    recorded = json.loads((ROOT / "tools" / "results" / "h200-bench.json").read_text())
    cases = [Case(**entry["case"]) for entry in recorded["timings"]]
    assert list(dict.fromkeys(cases)) == tool.default_cases()


def test_the_tool_writes_the_document(
    tool: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "out.json"
    on = Bench.on
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tool.Bench, "on", lambda device: on(CPU))
    monkeypatch.setattr(
        sys, "argv", ["bench", "--case", "time_last:1,8,16:float32", "--json", str(path)]
    )
    assert tool.main() == 0
    found = json.loads(path.read_text())
    jsonschema.Draft202012Validator(schema()).validate(found)
    assert {Case(**entry["case"]) for entry in found["timings"]} == {
        Case("time_last", 1, 8, 16, "float32")
    }
    assert "time_last" in capsys.readouterr().out


def test_the_tool_needs_a_gpu(
    tool: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert tool.main() == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["bench", "--case", "rows"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "the case is 'rows'; expected layout:batch,channels,time" in capsys.readouterr().err


# --- On a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu(capsys: Capture) -> None:
    words = ("--bs", "2", "--d_model", "64", "--seqlens", "128", "--no-peers", "--json")
    assert main(["bench", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(found)
    assert found["gpu"] == torch.cuda.get_device_name()
    assert [(t["direction"], t["who"]) for t in found["timings"]] == [
        (direction, f"scan-registry {language}")
        for direction in PASSES
        for language in ("cuda", "triton")
    ]
    for entry in found["timings"]:
        assert entry["floor"].startswith("stream.stream:cuda:")
        assert entry["floor_ms"] < 10 * entry["ms"]
