"""What operators keep from one call to the next: plans, each made once for all calls of a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from scan_registry.dispatch import policy

MOST_PLANS = 4096

#: Runs a kernel on tensors by the names of its pointers; a pointer whose tensor is missing is null.
Run = Callable[[Mapping[str, Tensor | None]], None]

_required = policy.required.get


class PlanCache:
    """Plans of calls. A plan is a function of the tensors, made once for all calls of a kind.

    Calls are of one kind if they agree in: which tensors are given, and their shapes, strides, dtypes, devices and
    how far the address of each is aligned, up to 16 bytes; the options; and what ``require`` allows. A plan does not
    change: what is installed or tuned later affects only kinds that have no plan yet. When there are
    ``MOST_PLANS`` plans, all are dropped. ``csrc/plans.h`` keeps the plans of the fast path by the same rules.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Any] = {}

    def run(
        self,
        make: Callable[..., Callable[..., Any]],
        tensors: Sequence[Tensor | None],
        *options: object,
    ) -> Any:
        """The result of the call's plan."""
        return self.plan(make, tensors, *options)(*tensors)

    def plan(
        self,
        make: Callable[..., Callable[..., Any]],
        tensors: Sequence[Tensor | None],
        *options: object,
    ) -> Callable[..., Any]:
        """The plan of calls of this kind. If there is none, ``make`` makes it from the tensors and options."""
        facts = [
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)
            for t in tensors
        ]
        key = (make, _required(), options, *facts)
        plan: Callable[..., Any] | None = self.get(key)
        if plan is None:
            plan = make(*tensors, *options)
            self.keep(key, plan)
        return plan

    def get(self, key: tuple[Any, ...]) -> Any:
        """What is kept by a key; None if nothing is."""
        return self._plans.get(key)

    def keep(self, key: tuple[Any, ...], value: Any) -> None:
        """A plan, or what an operator knows of calls beside it."""
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key] = value


#: The cache that all operators share.
plan_cache = PlanCache()
