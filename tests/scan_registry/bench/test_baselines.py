"""The baselines that ``bench`` times."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
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
        (SCALAR, "channel_last:1,8,100:float32", "layout is channel_last"),
        (WARP, "time_last:1,8,128:bfloat16", None),
        (WARP, "time_last:1,8,100:float32", "time is 100"),
        (COMPLEX, "time_last:1,8,100:complex64", None),
        (SEQUENTIAL_CUDA, "channel_last:1,768,3:bfloat16", None),
        (SEQUENTIAL_CUDA, "channel_last:1,100,8:float32", "100 channels"),
        (SEQUENTIAL_TRITON, "time_last:1,100,8:bfloat16", "layout is time_last"),
    ],
)
def test_what_baselines_refuse(baseline: Baseline, text: str, reason: str | None) -> None:
    result = baseline.refuses(Case.parse(text))
    assert result is None if reason is None else reason in (result or "")
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
