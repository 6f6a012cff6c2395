"""Gates that do not change with time, where the backward kernel sums up their gradient: how tensors get
there and back. The kernel is the reference's arithmetic here; its own is tested in tests/kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from explaining import Describe, Make
from planning import forget_plans
from selecting import in_memory
from torch import Tensor

from scan_registry import linear_scan
from scan_registry.diagnostics.explanation import explain_for
from scan_registry.dispatch.select import System
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.op import plans, totals
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.ops.launching import PlanCache

Tensors = Mapping[str, Tensor | None]
BOUNDS = (0, 0, 4, 9, 9, 13)
SM90 = Target.parse("sm90")


class Summing:
    """Stands in for a kernel, and counts its launches."""

    def __init__(self, dim: int, reverse: bool) -> None:
        self.dim, self.reverse, self.launches = dim, reverse, 0

    def plan(self, requested: Any, device: torch.device, backend: Any) -> Any:
        problem: LinearScanProblem | None = requested.fused()
        if problem is None:
            return None, 0
        self.pieces = problem.sum_pieces()
        assert problem.sums
        assert problem.scalars()["flags"] == 2 + problem.reverse
        return self.run, self.pieces

    def run(self, tensors: Tensors) -> None:
        self.launches += 1
        bounds, states = tensors["offsets"], tensors["states"]
        gates, sums = tensors["gates"], tensors["gates_grad"]
        assert gates is not None
        assert states is not None
        assert sums is not None
        how: dict[str, Any] = {"dim": self.dim, "reverse": self.reverse, "cu_seqlens": bounds}
        full, of_tokens, of_initial = reference.backward(
            gates.expand(states.shape).contiguous(),
            states,
            tensors["states_grad"],
            tensors["initial_state"],
            tensors["final_state_grad"],
            **how,
        )
        if bounds is None:
            total = full.sum(self.dim)
        else:
            runs = zip(bounds.tolist(), bounds[1:].tolist(), strict=False)
            parts = [full.narrow(self.dim, a, b - a).sum(self.dim) for a, b in runs]
            total = torch.stack(parts, self.dim)
        assert sums.shape == (self.pieces, total.numel())
        sums.fill_(0)
        sums[-1] = total.flatten()
        for name, found in (("tokens_grad", of_tokens), ("initial_state_grad", of_initial)):
            out = tensors[name]
            if out is not None:
                out.copy_(found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim", "gates"),
    [
        ((3, 13, 8), 1, (8,)),
        ((3, 13, 8), -2, (3, 1, 8)),
        ((2, 3, 13, 8), 2, (3, 1, 8)),
        ((13, 3, 8), 0, (1, 1, 8)),
        ((13, 8), 0, (8,)),
    ],
)
@pytest.mark.parametrize("wanted", ["all", "gates"])
def test_gradients_are_those_of_the_other_road(
    shape: tuple[int, ...],
    dim: int,
    gates: tuple[int, ...],
    reverse: bool,
    packed: bool,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = torch.tensor(BOUNDS) if packed else None
    between = (len(BOUNDS) - 1,) if packed else ()
    place = dim % len(shape)
    of_state = (*shape[:place], *between, *shape[place + 1 :])
    drawn = torch.rand(gates), torch.randn(shape), torch.randn(of_state)
    weights = torch.randn(shape), torch.randn(of_state)

    def gradients() -> list[Tensor | None]:
        leaves = [each.clone() for each in drawn]
        for leaf in leaves if wanted == "all" else leaves[:1]:
            leaf.requires_grad_()
        states, last = linear_scan(
            *leaves, dim=dim, reverse=reverse, cu_seqlens=bounds, return_final_state=True
        )
        ((states * weights[0]).sum() + (last * weights[1]).sum()).backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients()
    summing = Summing(place, reverse)
    monkeypatch.setattr(totals, "_MANY_SUMS", 1 if reverse else 2**18)  # in two steps, or in one
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    forget_plans(monkeypatch, "linear_scan")
    monkeypatch.setattr(plans, "_plan_sums", summing.plan)
    for found, other in zip(gradients(), expected, strict=True):
        assert (found is None) == (other is None)
        if found is not None and other is not None:
            torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-4)
    assert summing.launches == 1


@pytest.mark.parametrize("gates", [(13, 1), (1, 13, 8), (3, 13, 8)])
def test_gates_that_change_with_time_are_not_summed(
    gates: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    summing = Summing(1, False)
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    forget_plans(monkeypatch, "linear_scan")
    monkeypatch.setattr(plans, "_plan_sums", summing.plan)
    leaf = torch.rand(gates, requires_grad=True)
    linear_scan(leaf, torch.randn(3, 13, 8), dim=1).sum().backward()
    assert leaf.grad is not None
    assert summing.launches == 0


def test_the_total_of_sums_is_explained(a_device: Describe, a_binary: Make) -> None:
    """Where a backward kernel sums, its sums are added up next; else a reduction follows it."""
    every = [variant for kernel in FAMILY.kernels for variant in kernel.held("float32", SM90)]
    summed = [v for v in every if v.kernel != "channel_last_reduction"]
    tokens = torch.empty(40000, 2000, 4, dtype=torch.float32, device="meta", requires_grad=True)
    for held, gates, steps in (
        (every, (4,), ["forward", "backward", "gates_sum"]),
        (every, (2000, 4), ["forward", "backward", "reduction"]),
        (summed, (40000, 1, 4), ["forward", "backward", "gates_sum"]),
    ):
        archive = in_memory("sm90", [a_binary(variant, "sm90")[0] for variant in held])
        there = System(a_device(sm_count=132), (archive,))
        decay = torch.empty(gates, dtype=torch.float32, device="meta", requires_grad=True)
        explained = explain_for(there, "linear_scan", decay, tokens, dim=1)
        assert [step.name for step in explained.steps] == steps
        assert all(step.decision.launches for step in explained.steps)
    constant = decay.detach()  # without its gradient, the same kernel runs
    names = [step.name for step in explain_for(there, "linear_scan", constant, tokens, dim=1).steps]
    assert names == ["forward", "backward"]
