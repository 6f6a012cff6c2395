"""``SCAN_REGISTRY_LOG``: a line for the first call of each problem, and none without it."""

from __future__ import annotations

import pytest
import torch
from imaginary import NVRTC

import scan_registry
from scan_registry.base.environment import flag
from scan_registry.diagnostics.explanation import explain_for
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import System
from scan_registry.hardware.device import described
from scan_registry.kernels import family
from scan_registry.runtime import call_log, loader

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_log, "ON", True)
    monkeypatch.setattr(call_log, "_told", set())


def lines(capsys: Capture) -> list[str]:
    """What was written on stderr, without the program's name."""
    written = capsys.readouterr().err.splitlines()
    assert all(line.startswith("scan-registry: ") for line in written)
    return [line.removeprefix("scan-registry: ") for line in written]


def test_the_first_call_of_a_problem_writes_a_line(capsys: Capture) -> None:
    for time in (31, 31, 37):
        x = torch.rand(3, 5, time)
        scan_registry.linear_scan(x, x)
    compiled = "this package's compiled code for the CPU, where the tensors are"
    start = "linear_scan forward, float32"
    assert lines(capsys) == [f"{start} (3, 5, {time}): {compiled}" for time in (31, 37)]


def test_a_line_names_the_rank(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    x = torch.rand(3, 5, 53)
    scan_registry.linear_scan(x, x)
    (line,) = lines(capsys)
    assert line.startswith("[rank 3] linear_scan forward, float32 (3, 5, 53): ")


def test_a_backward_pass_has_a_line_of_its_own(capsys: Capture) -> None:
    x = torch.rand(3, 5, 41, requires_grad=True)
    scan_registry.min_gru(x, x).sum().backward()
    assert [line.partition(",")[0] for line in lines(capsys)] == [
        "gated_scan forward",
        "gated_scan backward",
    ]


def test_it_says_why_torch_runs(capsys: Capture) -> None:
    x = torch.rand(3, 5, 43)
    scan_registry.linear_scan(x, x, backend="reference")
    (line,) = lines(capsys)
    assert line.endswith(": torch's operators; backend is 'reference'")


def test_nothing_is_written_unless_asked_for(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_log, "ON", False)
    x = torch.rand(3, 5, 47)
    scan_registry.linear_scan(x, x)
    assert not lines(capsys)


def test_a_gpus_line_has_the_variant_its_origin_and_the_rule(capsys: Capture) -> None:
    x = torch.empty(8, 1536, 4096, device="meta")
    system = System(described((9, 0)), (), {"cuda": NVRTC})
    (step,) = explain_for(system, "linear_scan", x, x).steps
    for _ in range(2):
        call_log.tell_decision(step.decision)
    (line,) = lines(capsys)
    winner = step.decision.taken()
    assert line.startswith("linear_scan.time_last_forward, dtype float32, gates_dtype float32, ")
    assert "channels 12288, time 4096, alignment 16: " in line
    assert f"{winner.subject}, tier jit, compiled here, or taken from the cache" in line
    assert "; by " in line


def test_what_the_loader_prepares_is_written(capsys: Capture) -> None:
    x = torch.empty(8, 64, device="meta")
    (step,) = explain_for(System(described((9, 0))), "linear_scan", x, x).steps
    loader.prepare(None, family("linear_scan"), step.decision.problem, "auto", Tier.REFERENCE)
    (line,) = lines(capsys)
    assert "tier reference; no kernel fits" in line


@pytest.mark.parametrize(("value", "on"), [("info", True), ("", False), ("off", False)])
def test_the_variable(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(call_log.VARIABLE, value)
    assert flag(call_log.VARIABLE) is on
