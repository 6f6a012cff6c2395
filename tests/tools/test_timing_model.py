"""The timing models are those that the tables give."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.linear_scan.timing_model import Work, geometry, milliseconds, work_of
from scan_registry.kernels.tables import Measured, Run, Timing, models_file
from scan_registry.kernels.tuning import Row
from scan_registry.tuner.engine import TuningResult
from scan_registry.tuner.problems import posed


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> Any:
    return load_tool("timing_model")


@pytest.fixture(scope="module")
def written(tool: Any) -> Any:
    return json.loads(models_file(tool.SOURCES, tool.ARCH).read_text(encoding="utf-8"))


def test_the_models_are_fitted_to_the_tables_as_they_are(tool: Any, written: Any) -> None:
    again = "a table has changed since: run python tools/timing_model.py"
    assert written["tables"] == tool.tables(), again


def test_fitting_again_gives_the_same_estimates(tool: Any, written: Any) -> None:
    """Coefficients that hardly matter may differ."""
    fitted = tool.document()
    assert fitted.keys() == written.keys()
    assert fitted["gpus"] == written["gpus"]
    for kernel in tool.kernels():
        there, here = (each["kernels"][kernel.head] for each in (written, fitted))
        assert there.keys() == here.keys()
        for each in tool.every(kernel)[::20]:
            of = geometry(each.text)
            if of and of.design in here:
                gpu = written["gpus"][each.gpu]
                work = work_of(of, each.row.sizes, gpu["sm_count"], gpu["bandwidth"])
                ratio = milliseconds(work, here[of.design]) / milliseconds(work, there[of.design])
                assert abs(math.log(ratio)) < 0.03, each.text


def test_a_fit_finds_the_coefficients_that_times_were_made_with(tool: Any) -> None:
    """Where all of them matter; and outliers change little."""
    label = "dtype=bfloat16,gates=bfloat16,access=aligned,warps=1,rows={},lanes=32,pieces={},stages={},blocks=2"
    text = f"linear_scan.time_last_forward:cuda:{label}"
    true = dict(
        zip(
            tool.COEFFICIENTS,
            (2e-3, 1.1, 0.2, 3e-7, 1e-9, 2e-6, 2e-3, 4e-4, 1e-5, 0.6),
            strict=True,
        )
    )
    random, found, expected = np.random.default_rng(0), [], []
    for n in range(2000):
        variant = text.format(random.integers(1, 13), random.integers(1, 5), random.integers(2, 5))
        lines, time = (2 ** random.uniform(low, high) // 1 for low, high in ((2, 16), (4, 16)))
        sizes = {"lines": lines, "time": time, "sequences": 1, "broadcast": 1.0}
        of = geometry(variant)
        assert of is not None
        ms = milliseconds(work_of(of, sizes, 132, 4.38e9), true)
        off = 3.0 if n % 50 == 0 else 1.0
        found.append(tool.Timing(variant, "NVIDIA H200", "", Row(sizes, {}), off * ms, 1.0))
        expected.append((of, sizes, ms))
    coefficients = tool.fitted(found)["rows"]
    errors = [
        abs(math.log(milliseconds(work_of(of, sizes, 132, 4.38e9), coefficients) / ms))
        for of, sizes, ms in expected
    ]
    assert sorted(errors)[len(errors) // 2] < 0.02
    assert max(errors) < 0.2


def test_arithmetic_takes_arrays_as_it_takes_numbers(tool: Any, written: Any) -> None:
    (kernel, *_) = tool.kernels()
    coefficients = written["kernels"][kernel.head]["rows"]
    works = [Work(*np.random.default_rng(n).uniform(0.1, 9, len(Work._fields))) for n in range(5)]
    together: Any = milliseconds(Work(*np.array(works).T), coefficients)
    assert [*together] == pytest.approx([milliseconds(work, coefficients) for work in works])


def test_random_scans_are_written_as_fits_read_them(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = posed([Case.parse("time_last:2,8,512:float32")], ["cuda"], ["forward"])
    label = one.kernel.label(one.variants(Target((9, 0)))[0])
    run = Run("NVIDIA H200", "580.1", {}, {}, "9.9.9", "2026-01-31")
    measured = Measured(one.kernel.head, str(one), one.shape, {label: Timing(2.5, 0.1, 11)}, run)
    path = tool.write_points([TuningResult(one, measured, label)], 7, tmp_path)
    assert path.name == "sm90-random-7-h200.json"
    monkeypatch.setattr(tool, "random_files", lambda: [path])
    (point,) = tool.random_points(one.kernel)
    assert (point.text, point.gpu, point.ms) == (f"{one.kernel.head}:{label}", "NVIDIA H200", 2.5)
    assert point.row.sizes == one.shape.sizes


def test_timing_needs_a_gpu(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["timing_model", "--random", "2"])
    assert tool.main() == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
