"""The timing models are those that the tables give."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from scan_registry.kernels.linear_scan.timing_model import geometry, milliseconds, work_of
from scan_registry.kernels.tables import models_file


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
        there, here = (item["kernels"][kernel.head] for item in (written, fitted))
        assert there.keys() == here.keys()
        for item in tool.every(kernel)[::20]:
            of = geometry(item.text)
            if of and of.design in here:
                gpu = written["gpus"][item.gpu]
                work = work_of(of, item.row.sizes, gpu["sm_count"], gpu["bandwidth"])
                ratio = milliseconds(work, here[of.design]) / milliseconds(work, there[of.design])
                assert abs(math.log(ratio)) < 0.03, item.text


def test_timing_needs_a_gpu(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["timing_model", "--random", "2"])
    assert tool.main() == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
