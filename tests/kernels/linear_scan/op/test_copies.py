"""What scans copy, and how much memory that takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.linear_scan.op.copies import on_copies
from scan_registry.kernels.linear_scan.op.problems import Direction, StateLayout, make_kernel_call
from scan_registry.kernels.linear_scan.routes import as_rows
from scan_registry.ops.launching import PlanCache

CPU = torch.device("cpu")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "case",
    ["channel_last:2,11,101:float32", "channel_last:1,11,100:bfloat16:sequences=90:gates=channel"],
)
def test_copies_take_the_bytes_that_are_told(
    case: str, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Case.parse(case)
    gates, tokens, bounds = of.random_gates(CPU), of.sequence(CPU), of.bounds(CPU)
    others = {"tokens": tokens}
    if direction == "backward":
        others = {"states": tokens, "states_grad": tokens}
    problem = make_kernel_call(direction, gates, others, bounds, of.dim, False).problem
    state, result = StateLayout.of(tokens, of.dim, bounds).empty().zero_(), torch.zeros_like(tokens)
    given = dict.fromkeys(plans.POINTERS[direction], state) | others | {"gates": gates}
    given |= dict.fromkeys(("gates_grad", "tokens_grad"), result)
    if direction == "forward":
        given["states"] = result
    new, made = torch.Tensor.new_empty, list[int]()

    def counted(model: torch.Tensor, size: Any) -> torch.Tensor:
        found = new(model, size)
        made.append(found.nbytes)
        return found

    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    route = as_rows(problem)
    assert route is not None
    on_copies(problem, route, lambda _: None)(given)
    assert sum(made) == route.bytes


def test_states_are_left_out_where_a_reduction_sums_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that gives broadcast gates no gradient needs no states; so no route copies them for it."""
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    given: dict[str, Any] = {}
    runner = plans.runner

    def recorded(problem: Any, *how: Any) -> Any:
        run = runner(problem, *how)
        assert callable(run)

        def record(tensors: Any) -> None:
            given[problem.direction] = dict(tensors)
            run(tensors)

        return record

    monkeypatch.setattr(plans, "runner", recorded)
    gates, states, grad = torch.rand(11), torch.randn(2, 100, 11), torch.randn(2, 100, 11)
    how = None, None, None, plans.Options(-2), (True, True, True)
    plans.backward(gates, states, grad, *how)
    assert given["reduction"]["states"] is states
    assert given["backward"]["gates_grad"] is None
    assert given["backward"]["states"] is None
    plans.backward(gates.expand_as(states).contiguous(), states, grad, *how)
    assert given["backward"]["states"] is states
