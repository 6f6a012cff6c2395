"""``gated_scan`` on what stands for its kernels on the CPU: training, torch.compile, threads, and the fast path."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import gated_kernels
import pytest
import torch
from planning import forget_plans
from torch import Tensor

from scan_registry import gated_scan, min_gru, rg_lru
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.gated_scan.op import plans
from scan_registry.kernels.gated_scan.problem import GatedScanProblem
from scan_registry.kernels.model import Launch
from scan_registry.ops.launching import PlanCache


@pytest.fixture(params=["fast", "general"])
def used(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[GatedScanProblem]:
    return gated_kernels.played(monkeypatch, request.param == "fast")


def test_derivatives_of_derivatives(used: list[GatedScanProblem]) -> None:
    tensors = [t.requires_grad_() for t in gated_kernels.drawn("rg_lru", torch.float32)]
    wide = [t.detach().double().requires_grad_() for t in tensors]

    def second(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out = gated_scan("rg_lru", *leaves[:-1], initial_state=leaves[-1])
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in grads), leaves)

    for found, wanted in zip(second(tensors), second(wide), strict=True):
        assert relative_error(found, wanted) <= 1e-4
    assert [p.direction for p in used] == ["forward", "backward"]


def test_what_a_hook_lays_otherwise(used: list[GatedScanProblem]) -> None:
    tensors = gated_kernels.drawn("min_gru", torch.float32)
    wide = [t.double().requires_grad_() for t in tensors[:2]]
    leaves = [gated_kernels.laid(t, "channels").requires_grad_() for t in tensors[:2]]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()):
        out = min_gru(*leaves)
    found = torch.autograd.grad(out.sum(), leaves)
    gated_kernels.close([*found], [*torch.autograd.grad(min_gru(*wide).sum(), wide)], torch.float32)


def test_where_no_kernel_fits_the_composition_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection itself says so here, on a machine that it sees no GPU on."""
    monkeypatch.setattr(plans, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    forget_plans(monkeypatch, "gated_scan")
    tensors = gated_kernels.drawn("rg_lru", torch.float32)
    expected = gated_kernels.results("rg_lru", tensors, lambda _: "rows", True)
    gated_kernels.close(
        gated_kernels.results("rg_lru", tensors, lambda _: "rows", False), expected, torch.float32
    )


def test_a_launch_says_how_many_sums_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room for partial sums is that launch's, and all of them are added up."""
    shapes: list[torch.Size] = []

    def run(tensors: Mapping[str, Tensor | None]) -> None:
        sums = tensors["parameters_grad"]
        assert sums is not None
        shapes.append(sums.shape)
        sums.copy_(torch.arange(7.0).view(7, 1, 1))

    def prepared(ordinal: Any, group: Any, problem: Any, *_: Any) -> Any:
        scalars = {"parts": 7} if problem.direction == "backward" else {}
        launch = Launch((1, 1, 1), scalars)
        forward = problem.direction == "forward"
        return SimpleNamespace(
            launch=launch,
            decision=SimpleNamespace(launch=lambda: launch),
            run=(lambda tensors: None) if forward else run,
        )

    monkeypatch.setattr(plans, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(plans, "prepare", prepared)
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    forget_plans(monkeypatch, "gated_scan")
    *inputs, a_param, _ = gated_kernels.drawn("rg_lru", torch.float32)
    a_param.requires_grad_()
    out = gated_scan("rg_lru", *inputs, a_param)
    assert isinstance(out, Tensor)
    (grad,) = torch.autograd.grad(out.sum(), a_param)
    assert shapes == [(7, 1, 8)]
    assert torch.equal(grad, torch.full((8,), 21.0))


def test_plain_calls_are_planned_once(
    used: list[GatedScanProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = forget_plans(monkeypatch, "gated_scan")
    gate, hidden = (torch.randn(gated_kernels.SHAPE, requires_grad=True) for _ in range(2))
    for _ in range(3):
        min_gru(gate, hidden).sum().backward()
    with torch.no_grad():
        min_gru(gate, hidden)
    assert len(used) == 7
    # With gradients and without.
    assert [plan is not None for plan in (*forward, *backward)] == [True, True, True]


def test_what_the_fast_path_leaves_to_others(
    used: list[GatedScanProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, _ = forget_plans(monkeypatch, "gated_scan")
    gate, hidden = (torch.randn(gated_kernels.SHAPE) for _ in range(2))
    with pytest.raises(TypeError, match=r"hidden has dtype torch\.float64"):
        min_gru(gate, hidden.double())
    with pytest.raises(ValueError, match="backend is 'fast'"):
        min_gru(gate, hidden, backend="fast")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="reverse is 1; it must be a bool"):
        min_gru(gate, hidden, reverse=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="gate must be a"):
        min_gru(None, hidden)  # type: ignore[call-overload]
    assert not plans
    narrow = torch.rand(8).bfloat16()
    out = rg_lru(gate, hidden, gate, narrow, cu_seqlens=gated_kernels.BOUNDS.int())
    wide = gate.double(), hidden.double(), gate.double(), narrow.double()
    assert relative_error(out, rg_lru(*wide, cu_seqlens=gated_kernels.BOUNDS)) <= 2e-6
    assert plans[0] is None


def test_training_after_a_change_of_an_input_is_refused(used: list[GatedScanProblem]) -> None:
    gate, hidden = (torch.randn(gated_kernels.SHAPE, requires_grad=True) for _ in range(2))
    out = min_gru(gate, hidden)
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
