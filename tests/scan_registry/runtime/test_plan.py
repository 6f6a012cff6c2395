"""A plan's launch: which pointer goes where, and what a launch that failed says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scan_registry.hardware import driver
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.runtime.loader import Plan

KERNEL = FAMILY.kernel("time_last_forward", "cuda")


class Launches:
    """Notes what is launched, and returns a status."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.calls = status, list[tuple[int | None, ...]]()

    def run(self, *inputs: int | None) -> int:
        self.calls.append(inputs)
        return self.status


def a_plan(monkeypatch: pytest.MonkeyPatch, launch: Any, workspace: int = 0) -> Plan:
    """On a GPU whose memory is the CPU's, and whose current stream is 7."""
    empty = torch.empty
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 7, raising=False)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    winner = SimpleNamespace(variant=KERNEL.variants[0])
    decision: Any = SimpleNamespace(
        family=FAMILY, problem="a problem", taken=lambda: winner, launch=lambda: None
    )
    return Plan(decision, 0, None, launch, workspace)


def test_tensors_go_where_the_kernel_has_their_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, gates, states = Launches(), torch.zeros(4), torch.zeros(4)
    plan = a_plan(monkeypatch, launches)
    plan.run({"states": states, "gates": gates, "tokens": None})
    addresses = {"gates": gates.data_ptr(), "states": states.data_ptr()}
    assert launches.calls == [(7, *map(addresses.get, KERNEL.pointers))]
    assert plan.run is plan.run


def test_a_launch_has_a_workspace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    a_plan(monkeypatch, launches, workspace=64).run({})
    ((_, *pointers),) = launches.calls
    inputs = [name for name, at in zip(KERNEL.pointers, pointers, strict=True) if at is not None]
    assert inputs == ["workspace"]


def test_a_launch_that_failed_says_what_was_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = a_plan(monkeypatch, Launches(status=700))
    words = lambda what, status, subject: ValueError(f"{what}: {status}, {subject}")  # noqa: E731
    monkeypatch.setattr(driver, "DriverError", words)  # which asks the driver for the status's name
    with pytest.raises(ValueError, match="the launch: 700, the reference, for a problem"):
        plan.run({})
