"""What operators keep from one call to the next: what it does, planned once for all calls of a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from scan_registry.dispatch import policy

MOST_PLANS = 4096

#: Runs a kernel on tensors by the names of its pointers; those that are not there are null.
Run = Callable[[Mapping[str, Tensor | None]], None]

_required = policy.required.get


class PlanCache:
    """What calls do to their tensors, planned once for all that agree in what a plan depends on.

    That is which tensors are there, with their shapes, strides, dtypes and devices; how far all of their addresses
    are aligned, up to 16 bytes; the options; and what ``require`` allows. A plan stays as it was made: what is
    installed or tuned later counts for calls of another kind. Past ``MOST_PLANS`` all plans go.
    ``csrc/plans.h`` keeps those of the fast path by the same rules.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Any] = {}

    def run(
        self,
        make: Callable[..., Callable[..., Any]],
        tensors: Sequence[Tensor | None],
        *options: object,
    ) -> Any:
        """What the plan makes of the tensors. ``make`` plans the first call of a kind, from both."""
        return self.plan(make, tensors, *options)(*tensors)

    def plan(
        self,
        make: Callable[..., Callable[..., Any]],
        tensors: Sequence[Tensor | None],
        *options: object,
    ) -> Callable[..., Any]:
        """What ``run`` runs."""
        facts: list[Any] = []
        addresses = 0
        for tensor in tensors:
            if tensor is None:
                facts.append(None)
            else:
                facts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
                addresses |= tensor.data_ptr()
        key = (make, addresses & 15, _required(), options, *facts)
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


#: Of all operators.
plan_cache = PlanCache()
