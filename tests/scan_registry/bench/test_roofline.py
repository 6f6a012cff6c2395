"""The roofline that ``bench`` measures, and the targets."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from benching import CPU, SMALL, Capture, document, refusal, schema

from scan_registry.bench import measure, roofline
from scan_registry.bench.measure import Bench
from scan_registry.bench.targets import Use, outcomes, uses
from scan_registry.cli import bench as command
from scan_registry.cli import main
from scan_registry.kernels.linear_scan.op.baselines import Baseline
from scan_registry.kernels.linear_scan.op.bench import BENCHMARK, TARGETS, Case, ScanBenchmark
from scan_registry.ops.benchmark import PerformanceTarget, Timing
from scan_registry.ops.operator import PASSES


class Launches:
    """What preparing a stream kernel and starting it is, on this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, set[str], int]] = []
        monkeypatch.setattr(roofline.loader, "prepare", self.prepare)
        monkeypatch.setattr(roofline.accuracy, "start", self.start)

    def prepare(self, ordinal: int, family: Any, problem: Any, *others: Any) -> Any:
        assert family.kernels[0].rules.accepts(others[-1], problem) is None
        return types.SimpleNamespace(launch=str(others[-1]), workspace=0)

    def start(self, ordinal: int, launch: Any, kernel: Any, case: Any, workspace: int) -> None:
        assert set(case.tensors) <= set(kernel.pointers)
        (size,) = {tensor.numel() for tensor in case.tensors.values()}
        self.started.append((launch, set(case.tensors), size))


def test_the_roofline_streams_as_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    result = dict(roofline.stream_calls(2, 1, 4001, 3, CPU))
    assert len(result) > 1
    for name, calls in result.items():
        assert len(calls) == 3
        calls[0]()
        assert launches.started.pop() == (name, {"a", "b", "sum"}, 1001)


def test_the_fastest_stream_is_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Bench.on(BENCHMARK, CPU)

    def scripted(recordings: Any, *_: int) -> Any:
        return [(10.0, 1.0), (20.0, 1.0), (8.0, 0.5), (7.0, 0.5)]

    monkeypatch.setattr(measure, "compete", scripted)
    monkeypatch.setattr(Bench, "_rooflines", lambda *_: {"slow": None, "fast": None})
    here.passes = ("forward",)
    here.run(SMALL)
    assert [(t.who, t.ms, t.roofline_ms, t.roofline) for t in here.timings] == [
        ("scan-registry cpu", 10.0, 7.0, "fast"),
        ("torch.mul", 20.0, 7.0, "fast"),
    ]
    jsonschema.Draft202012Validator(schema()).validate(here.document())


def test_targets_are_of_cases_that_can_be_named() -> None:
    assert len({target.case for target in TARGETS}) == len(TARGETS) > 100
    for target in TARGETS:
        assert Case.parse(str(target.case)) == target.case
        assert 0.8 <= target.ratio <= 0.95


def test_uses_are_many_shapes() -> None:
    cases = [target.case for target in BENCHMARK.uses]
    assert len({*cases}) == len(cases) >= 40
    assert len({target.use for target in BENCHMARK.uses}) > 5


def on_cpu(monkeypatch: pytest.MonkeyPatch, *few: PerformanceTarget) -> None:
    """Few targets, on a CPU that says it is a GPU; it has a roofline of its own."""
    monkeypatch.setattr(ScanBenchmark, "targets", few)
    on, device = Bench.on, types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(command, "_device", lambda name: device)
    monkeypatch.setattr(
        Bench, "on", lambda benchmark, _, *others, **options: on(benchmark, CPU, *others, **options)
    )


def test_targets_are_met_or_missed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Case("channel_last", 1, 8, 64, "float32", sequences=3)
    easy, hard = PerformanceTarget(SMALL, 1e-9), PerformanceTarget(packed, 1e9)
    on_cpu(monkeypatch, easy, hard)
    assert main(["bench", "--targets"]) == 1
    out = capsys.readouterr().out
    assert "2 of 4 targets met, 4 timed" in out
    assert "1, 8, 64, 3 packed sequences" in out
    assert main(["bench", "--targets", "--only", "2,8,16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(report)
    assert [
        (target["direction"], target["target"], target["met"]) for target in report["targets"]
    ] == [(direction, 1e-9, True) for direction in PASSES]
    ours = [entry for entry in report["timings"] if entry["who"] != "torch.mul"]
    for item, entry in zip(report["targets"], ours, strict=True):
        assert item["case"] == entry["case"]
        assert item["ratio"] == entry["roofline_ms"] / entry["ms"]


def test_shapes_of_a_use_are_summed_up(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, PerformanceTarget(SMALL, 1e-9))
    cases = SMALL, replace(SMALL, time=32), replace(SMALL, time=64)
    shapes = tuple(
        PerformanceTarget(case, 1e-9, use)
        for case, use in zip(cases, ("noise", "noise", "one"), strict=True)
    )
    monkeypatch.setattr(ScanBenchmark, "uses", shapes)
    assert main(["bench", "--uses", "--fwd_only", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(report)
    assert [item["use"] for item in report["targets"]] == ["noise", "noise", "one"]
    assert main(["bench", "--uses", "--fwd_only"]) == 0
    rows = capsys.readouterr().out.partition("by use")[2]
    assert ["noise", "forward", "2"] in [line.split()[:3] for line in rows.splitlines()]
    assert main(["bench", "--uses", "--targets"]) == 2


def test_uses_have_the_geometric_mean_and_the_least_of_their_shapes() -> None:
    targets = [PerformanceTarget(replace(SMALL, time=n), 0.5, "noise") for n in (8, 16)]
    timings = [
        Timing(target.case, way, "scan-registry cuda", ms, 0.0, 1.0)
        for target, ms in zip(targets, (1.0, 4.0), strict=True)
        for way in PASSES
    ]
    plain = PerformanceTarget(SMALL, 0.5)
    assert uses(outcomes([*targets, plain], timings)) == [
        Use("noise", way, 2, 0.5, 0.25) for way in PASSES
    ]


def test_what_is_not_timed_is_no_target_met(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(SMALL, time=32)
    on_cpu(monkeypatch, PerformanceTarget(SMALL, 1e-9), PerformanceTarget(other, 1e-9))
    assert main(["bench", "--goals", "--budget", "1e-9"]) == 1  # the former name
    out = capsys.readouterr().out
    assert "0 of 4 targets met, 0 timed" in out
    assert f"not everywhere timed: {other}: not begun in time" in out
    run = Bench.run

    def failing(self: Bench, case: Case) -> None:
        if case == SMALL:
            raise torch.OutOfMemoryError("too large")
        run(self, case)

    monkeypatch.setattr(Bench, "run", failing)
    assert main(["bench", "--targets"]) == 1
    out = capsys.readouterr().out
    assert "2 of 4 targets met, 2 timed" in out
    assert f"not everywhere timed: {SMALL}: too large" in out

    def interrupted(self: Bench, case: Case) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "run", interrupted)
    assert main(["bench", "--targets"]) == 130
    assert "interrupted: what was timed is kept" in capsys.readouterr().err


def test_cases_by_name(capsys: Capture) -> None:
    name = "channel_last:2,8,16:float32:gates=channel"
    report = document(
        capsys, "--case", name, "--case", "time_last:1,2,3:fp64".replace("fp", "float")
    )
    assert report["timings"][0]["case"]["gates"] == "channel"
    assert {t["case"]["layout"] for t in report["timings"]} == {"channel_last", "time_last"}
    assert "--case: the case is 'x'" in refusal(capsys, "--device", "cpu", "--case", "x")


def test_targets_need_a_gpu_and_a_case(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--targets are for GPUs" in refusal(capsys, "--device", "cpu", "--targets")
    on_cpu(monkeypatch, PerformanceTarget(SMALL, 1e-9))
    assert "--only 'nothing' leaves no case" in refusal(capsys, "--targets", "--only", "nothing")


def test_baselines_take_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Bench.on(BENCHMARK, CPU)
    here.baselines = (
        Baseline("plain", "x", "a_baseline", "scan", lambda *_: pytest.fail("asked")),
    )
    here.run(replace(SMALL, gates="channel"))
    assert here.skipped == {"plain": "it does not take a gate per channel"}
