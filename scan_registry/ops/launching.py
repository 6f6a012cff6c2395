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

    Calls are of one kind if they agree in: which tensors are given, and their shapes, strides, dtypes and devices;
    how far their addresses are aligned, up to 16 bytes; the options; and what ``require`` allows. A plan does not
    change: what is installed or tuned later affects only kinds that have no plan yet. When there are
    ``MOST_PLANS`` plans, all are dropped. ``csrc/plans.h`` keeps the plans of the fast path by the same rules.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def run(
        self,
        make: Callable[..., Callable[..., Any]],
        tensors: Sequence[Tensor | None],
        *options: object,
    ) -> Any:
        """The result of the call's plan. If there is none, ``make`` makes it from the tensors and options."""
        facts: list[Any] = []
        addresses = 0
        for tensor in tensors:
            if tensor is None:
                facts.append(None)
            else:
                facts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
                addresses |= tensor.data_ptr()
        key = (make, addresses & 15, _required(), options, *facts)
        plan = self._plans.get(key)
        if plan is None:
            plan = make(*tensors, *options)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan(*tensors)


#: The cache that all operators share.
plan_cache = PlanCache()
