"""The baselines that ``bench`` times."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
import torch
from benching import CPU, SMALL

from scan_registry.bench.measure import Bench
from scan_registry.catalog import distributions
from scan_registry.cli import bench as command
from scan_registry.kernels.linear_scan.op import bench as linear_scan_bench
from scan_registry.kernels.linear_scan.op.baselines import (
    BASELINES,
    COMPLEX,
    OURS,
    SCALAR,
    SEQUENTIAL_CUDA,
    SEQUENTIAL_TRITON,
    TIMED,
    WARP,
    Baseline,
    installed,
)
from scan_registry.kernels.linear_scan.op.bench import BENCHMARK, Case
from scan_registry.kernels.linear_scan.op.function import linear_scan
from scan_registry.ops.operator import PASSES


def test_the_cpu_has_no_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_scan_bench, "installed", lambda: pytest.fail("looked for"))
    assert Bench.on(BENCHMARK, CPU).baselines == ()


def test_baselines_are_timed_where_they_take_the_case(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One is, one refuses one case, one does not import, which is tried once, and one does not run;
    what the import prints does not get among the results."""
    module: Any = types.ModuleType("a_baseline")
    module.passes = []
    monkeypatch.setitem(sys.modules, "a_baseline", module)

    def kernel(module: Any, direction: str, *tensors: Any) -> Any:
        assert {(*t.shape,) for t in tensors} in ({(2, 16, 8)}, {(2, 32, 8)})
        return lambda: module.passes.append(direction)

    tried: list[str] = []

    class Broken(Baseline):
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

    baselines = (
        Baseline("fits", "x", "a_baseline", "scan", kernel),
        Baseline("failing", "x", "a_baseline", "scan", failing),
        Baseline(
            "picky",
            "x",
            "a_baseline",
            "scan",
            kernel,
            lambda c: "too short" if c.time < 32 else None,
        ),
        Broken("broken", "x", "a_baseline", "scan", kernel),
    )
    here = Bench.on(BENCHMARK, CPU)
    here.baselines = baselines
    longer = Case("channel_last", 2, 8, 32, "float32")
    here.run(SMALL)
    here.run(longer)
    who = {(t.case.time, t.direction, t.who) for t in here.timings}
    assert {(16, direction, "fits") for direction in PASSES} <= who
    assert {(32, direction, "picky") for direction in PASSES} <= who
    assert (16, "forward", "picky") not in who
    assert set(module.passes) == set(PASSES)
    assert sorted(tried) == ["broken", *["failing"] * 4]
    assert here.document()["skipped"] == here.skipped
    assert here.skipped == {
        "picky": "too short",
        "broken": "OSError: no compiler",
        f"failing, {SMALL}": "RuntimeError: no such instruction",
        f"failing, {longer}": "RuntimeError: no such instruction",
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
    ("baseline", "text", "reason"),
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
def test_what_baselines_refuse(baseline: Baseline, text: str, reason: str | None) -> None:
    found = baseline.refuses(Case.parse(text))
    assert found is None if reason is None else reason in (found or "")
    if reason is not None:
        assert baseline.kernel_call(Case.parse(text), "forward", CPU) is None


def test_baselines_are_the_installed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"accelerated-scan": "0.3.1"}

    monkeypatch.setattr(distributions, "version", versions.get)
    assert installed() == [SCALAR, WARP, COMPLEX]
    versions.clear()
    assert installed() == []
    assert len({baseline.name for baseline in TIMED}) == len(TIMED)
    assert set(BASELINES) < set(TIMED)
    assert OURS not in TIMED
    assert OURS.load() is linear_scan


def test_kernels_of_baselines_are_called_as_they_are_defined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On stand-ins with their signatures: every pass of every baseline gets its tensors."""
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
    for baseline, text, forward, backward, shape in [
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
            make = baseline.kernel_call(Case.parse(text), direction, CPU)
            assert make is not None
            make()()
            assert calls.pop() == (name, [shape] * count)
    assert not calls
