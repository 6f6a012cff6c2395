"""Regret, the record of a run, and the document."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.tuner import engine, report
from scan_registry.tuner.problems import posed


def tuned(workshop: Any, *cases: str) -> Any:
    requested = list(posed(map(Case.parse, cases), ["cuda"], ["forward"]))
    tuner = workshop.tuner()
    tuner.tune(requested)
    return tuner


def test_regret_is_of_what_would_run_untuned(workshop: Any) -> None:
    (problem,) = posed([Case.parse("time_last:2,8,512:float32")], ["cuda"], ["forward"])
    shipped = engine.untuned(0, problem)
    workshop.ms = lambda variant: 4.0 if variant == shipped else 2.0
    tuner = tuned(workshop, "time_last:2,8,512:float32", "time_last:2,8,500:float64")
    shares = [item.regret for item in tuner.tuned]
    assert shares[0] == 2.0
    result = report.regret(tuner.tuned)
    assert result is not None
    assert (result.problems, result.worst) == (2, max(shares))
    assert result.geometric_mean == pytest.approx((shares[0] * shares[1]) ** 0.5)
    assert report.regret([]) is None


def test_the_document(workshop: Any) -> None:
    schema = json.loads(
        files("scan_registry").joinpath("schemas", "tune.json").read_text(encoding="utf-8")
    )
    tuner = tuned(
        workshop, "time_last:2,8,512:float32", "channel_last:2,8,64:float32:gates=channel"
    )
    tuner.refused[tuner.tuned[0].posed.variants(Target((9, 0)))[0]] = "a reason"
    tuner.left_out.append(tuner.tuned[0].posed)
    result = json.loads(json.dumps(report.document(tuner, "/somewhere")))
    jsonschema.validate(result, schema)
    assert len(result["problems"]) == 2
    first = result["problems"][0]
    assert first["timings"][first["best"]]["ms"] == first["best_ms"]
    more = {**result, "more": 1}
    less = {k: v for k, v in result.items() if k != "run"}
    for wrong in (more, less):
        assert list(jsonschema.Draft202012Validator(schema).iter_errors(wrong))
    tuner.tuned.clear()
    empty = report.document(tuner, None)
    jsonschema.validate(json.loads(json.dumps(empty)), schema)
    assert (empty["regret"], empty["saved"]) == (None, None)


def test_what_the_drivers_tool_tells(a_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[list[str]] = []

    def answer(command: list[str], **_: Any) -> Any:
        requested.append(command)
        return subprocess.CompletedProcess(command, 0, "580.105, 1980, 2619, [N/A], 3201\n")

    monkeypatch.setattr(subprocess, "run", answer)
    run = report.run_here(3, a_device())
    assert "--id=3" in requested[0]
    assert run.driver == "580.105"
    assert run.clocks == {"sm": 1980, "memory": 2619, "most_memory": 3201}
    assert set(run.toolchain) == {"cuda", "triton"}

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    run = report.run_here(0, a_device())
    assert (run.driver, run.clocks) == ("for CUDA 13.0", {})
