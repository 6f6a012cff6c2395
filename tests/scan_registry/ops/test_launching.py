"""The cache of plans: what a plan depends on, and how many are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import require
from scan_registry.ops.launching import MOST_PLANS, PlanCache


class Planner:
    """Counts the plans, each of which returns its number."""

    def __init__(self) -> None:
        self.cache, self.made = PlanCache(), 0

    def plan(self, *request: Any) -> Any:
        number, self.made = self.made, self.made + 1
        self.request = request
        return lambda *tensors: number

    def __call__(self, *tensors: Tensor | None, options: tuple[Any, ...] = (1, "auto")) -> int:
        number: int = self.cache.run(self.plan, tensors, *options)
        return number


MEMORY = torch.arange(64, dtype=torch.float32)
FIRST = MEMORY[:12].view(3, 4)


def test_calls_of_one_kind_are_planned_once() -> None:
    planner = Planner()
    other = torch.empty(64)[16:28].view(3, 4)
    assert [planner(FIRST, None), planner(other, None), planner(FIRST, None)] == [0, 0, 0]
    assert planner.request[1:] == (None, 1, "auto")
    assert planner.request[0] is FIRST


@pytest.mark.parametrize(
    "tensors",
    [
        (MEMORY[:8].view(2, 4), None),
        (MEMORY[:12].view(4, 3).t(), None),
        (FIRST.to(torch.float64), None),
        (FIRST.to("meta"), None),
        (MEMORY[1:13].view(3, 4), None),
        (FIRST, FIRST),
        (None, FIRST),
    ],
    ids=["shape", "strides", "dtype", "device", "alignment", "another", "place"],
)
def test_a_call_of_another_kind_has_a_plan_of_its_own(tensors: Any) -> None:
    planner = Planner()
    assert [planner(FIRST, None), planner(*tensors), planner(FIRST, None)] == [0, 1, 0]


def test_plans_depend_on_the_alignment_of_each_tensor() -> None:
    """A plan may choose its kernel by the addresses of some tensors only."""
    planner, misaligned = Planner(), MEMORY[1:13].view(3, 4)
    assert [planner(FIRST, misaligned), planner(misaligned, FIRST)] == [0, 1]


def test_plans_depend_on_options_on_what_is_required_and_on_who_plans() -> None:
    planner = Planner()
    assert [planner(FIRST), planner(FIRST, options=(2, "auto"))] == [0, 1]
    with require("aot"):
        assert planner(FIRST) == 2
    assert planner(FIRST) == 0
    assert planner.cache.run(lambda *_: lambda *_: -1, (FIRST,), 1, "auto") == -1


def test_past_the_bound_all_plans_go() -> None:
    planner = Planner()
    for _ in range(2):
        result = [planner(FIRST, options=(item,)) for item in range(MOST_PLANS)]
        assert result == [*range(MOST_PLANS)]
    assert [planner(MEMORY), planner(FIRST, options=(0,))] == [MOST_PLANS, MOST_PLANS + 1]
    assert planner(MEMORY) == MOST_PLANS


def test_what_could_not_be_planned_is_planned_anew() -> None:
    cache = PlanCache()

    def fail(*request: Any) -> Any:
        raise ValueError("as planned")

    for _ in range(2):
        with pytest.raises(ValueError, match="as planned"):
            cache.run(fail, (FIRST,))
