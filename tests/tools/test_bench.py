"""``tools/bench.py``: its cases, and what torch's associative_scan is timed on."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from scan_registry import linear_scan
from scan_registry.kernels.linear_scan.op import bench as linear_scan_bench
from scan_registry.kernels.linear_scan.op.bench import Case

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def baselines(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("bench")


@pytest.mark.slow
def test_torchs_associative_scan_computes_the_recurrence(
    baselines: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without inductor's code, which is torch's own matter."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    associative = baselines.ASSOCIATIVE
    gates, tokens = torch.rand(1, 2, 3), torch.randn(1, 2, 3)
    call = associative.kernel(
        importlib.import_module(associative.module), "forward", gates, tokens, tokens
    )
    torch.testing.assert_close(call(), linear_scan(gates, tokens))


def test_its_cases_are_those_of_the_recorded_results(baselines: Any) -> None:
    path = Path(__file__).parents[2] / "tools" / "results" / "h200-bench.json"
    recorded = json.loads(path.read_text(encoding="utf-8"))["timings"]
    assert list(dict.fromkeys(str(Case(**timing["case"])) for timing in recorded)) == [
        *baselines.CASES
    ]


@pytest.mark.parametrize("more", [[], ["--associative"]])
def test_it_times_as_the_command_does(
    baselines: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    monkeypatch.setattr(linear_scan_bench, "BENCHMARK", linear_scan_bench.BENCHMARK)
    words = ["--device", "cpu", "--json", "--case", "channel_last:1,8,16:float32"]
    monkeypatch.setattr("sys.argv", ["bench", *more, *words])
    assert baselines.main() == 0
    timings = json.loads(capsys.readouterr().out)["timings"]
    assert {timing["who"] for timing in timings} == {"scan-registry cpu", "torch.mul"}
    associative = baselines.ASSOCIATIVE in linear_scan_bench.BENCHMARK.baselines(CPU)
    assert associative is bool(more)
