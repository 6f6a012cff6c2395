"""Calls on a number of tensors, planned in C: which take that path, and what a plan depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from placing import memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scan_registry.hardware._launcher import TensorPath
from scan_registry.ops.derivatives import OBSERVERS, PLAIN_TYPES

pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no table of DLPack's"
)


class Planner:
    """Calls of three tensors that return the numbers of their plans."""

    def __init__(self, **parts: Any) -> None:
        self.requests: list[Any] = []
        self.choice: object = None
        self.calls = TensorPath(**self.parts() | parts)

    def parts(self) -> dict[str, Any]:
        return {
            "types": PLAIN_TYPES,
            "tensor": torch._C.TensorBase,
            "exchange": getattr(Tensor, "__dlpack_c_exchange_api__", None),
            "observers": OBSERVERS,
            "choice": lambda: self.choice,
            "plan": self.plan,
            "tracking": torch.is_grad_enabled,
            "count": 3,
            "aligned": 0b001,
        }

    def plan(self, *request: Any) -> Any:
        number = len(self.requests)
        self.requests.append(request)
        return lambda *tensors: (number, tensors)

    def __call__(self, *tensors: Any, flag: Any = False) -> Any:
        found = self.calls.run(flag, *tensors)
        return found if found is None else found[0]


PLAIN = memory(2, 3)
INDICES = memory(3, dtype=torch.int32)


def test_a_call_is_planned_once() -> None:
    planner, tensors = Planner(), (PLAIN, None, INDICES)
    assert [planner(*tensors) for _ in range(3)] == [0, 0, 0]
    assert planner.requests == [(False, *tensors)]
    number, given = planner.calls.run(False, *tensors)
    assert number == 0
    assert all(one is other for one, other in zip(given, tensors, strict=True))


def test_booleans_are_marks() -> None:
    """Plans are made of booleans only where they are expected."""
    marks = torch.zeros(2, 3, dtype=torch.bool)
    assert Planner()(PLAIN, PLAIN, marks) is None
    planner = Planner(marks=0b100)
    assert planner(PLAIN, PLAIN, marks) == 0
    assert planner(PLAIN, PLAIN, PLAIN) == 1
    assert planner(PLAIN, marks, marks) is None


def test_what_plans_depend_on() -> None:
    """The flag, the choice, and of each tensor whether it is there, its shape, strides and dtype."""
    planner = Planner()
    others: list[Callable[[], Any]] = [
        lambda: planner(PLAIN, PLAIN, PLAIN),
        lambda: planner(PLAIN, PLAIN, PLAIN, flag=True),
        lambda: planner(PLAIN, PLAIN, None),
        lambda: planner(PLAIN, None, PLAIN),
        lambda: planner(PLAIN, PLAIN, memory(3, 2)),
        lambda: planner(PLAIN, PLAIN, memory(3, 2).T),
        lambda: planner(PLAIN, PLAIN, memory(6)),
        lambda: planner(PLAIN, PLAIN, memory(2, 3, dtype=torch.bfloat16)),
        lambda: planner(PLAIN, PLAIN, memory(2, 3, dtype=torch.float16)),
        lambda: planner(PLAIN, PLAIN, memory(2, 3, dtype=torch.int32)),
        lambda: planner(PLAIN, PLAIN, memory(2, 3, dtype=torch.int64)),
        lambda: planner(memory(2, 3, off=1), PLAIN, PLAIN),
        lambda: planner(memory(2, 3, off=2), PLAIN, PLAIN),
    ]
    for _ in range(2):
        assert [call() for call in others] == [*range(len(others))]
    assert planner(PLAIN, memory(2, 3, off=1), PLAIN) == 0  # nothing depends on its alignment
    planner.choice = object()
    assert planner(PLAIN, PLAIN, PLAIN) == len(others)


@pytest.mark.parametrize(
    "odd",
    [
        3.0,
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3, dtype=torch.complex64),
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(0, 3),
        torch.zeros(1, 1, 1, 1, 1),
        torch._neg_view(torch.zeros(2, 3)),
        torch.zeros(2, 3).requires_grad_(),
    ],
    ids=["number", "meta", "complex", "sparse", "empty", "rank", "negated", "differentiated"],
)
def test_other_calls_are_left_to_others(odd: Any) -> None:
    planner = Planner()
    for place in range(3):
        tensors: list[Any] = [PLAIN] * 3
        tensors[place] = odd
        assert planner(*tensors) is None
    assert planner(None, None, None) is None
    assert not planner.requests


def test_without_derivatives_tensors_may_require_them() -> None:
    planner, tracked = Planner(), torch.zeros(2, 3, requires_grad=True)
    with torch.no_grad():
        assert planner(tracked, PLAIN, PLAIN) == 0


def test_dispatch_has_to_be_trivial() -> None:
    planner = Planner()
    with TorchDispatchMode():
        assert planner(PLAIN, PLAIN, PLAIN) is None
    assert torch.vmap(lambda x: x if planner(x, x, x) is None else x + 1)(PLAIN).sum() == 0
    assert Planner(exchange=None)(PLAIN, PLAIN, PLAIN) is None
    assert planner(PLAIN, PLAIN, PLAIN, flag=1) is None
    assert not planner.requests


def test_what_planning_raises_is_raised() -> None:
    def fail(*args: Any) -> Any:
        raise LookupError(len(args))

    tracked = torch.zeros(2, 3, requires_grad=True)
    for name, count in (("plan", 4), ("choice", 0), ("tracking", 0)):
        with pytest.raises(LookupError, match=str(count)):
            Planner(**{name: fail})(tracked if name == "tracking" else PLAIN, PLAIN, PLAIN)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: Planner().calls.run(False, PLAIN), TypeError),
        (lambda: Planner(count=13), ValueError),
        (lambda: Planner(count=0), ValueError),
        (lambda: Planner(types=(int,)), TypeError),
    ],
    ids=["tensors", "many", "none", "types"],
)
def test_wrong_calls(call: Callable[[], Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        call()
