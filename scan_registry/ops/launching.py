"""What operators keep from one call to the next: plans, each made once for all calls of a kind; and what plans are made
with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.runtime import call_log

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
        key = (make, _required(), options, *facts_of(tensors))
        plan: Callable[..., Any] | None = self.get(key)
        if plan is None:
            policy.lowest()  # raises for an unknown level, on the CPU too
            plan = make(*tensors, *options)
            self.keep(key, plan)
            if call_log.ON:
                call_log.tell_plan(make, tensors, options)
        return plan

    def get(self, key: tuple[Any, ...], default: Any = None) -> Any:
        """What is kept by a key; ``default`` if nothing is."""
        return self._plans.get(key, default)

    def keep(self, key: tuple[Any, ...], value: Any) -> None:
        """A plan, or what an operator knows of calls beside it."""
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key] = value


def facts_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """What plans depend on, of each tensor."""
    return [
        None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)
        for t in tensors
    ]


#: The cache that all operators share.
plan_cache = PlanCache()


def addresses_of(tensors: Sequence[Tensor | None]) -> int:
    """The lowest four bits of the addresses of all tensors, combined by "or": 0 if all start on 16 bytes."""
    bits = 0
    for tensor in tensors:
        bits |= 0 if tensor is None else tensor.data_ptr()
    return bits & 15


def pointers_of(tensors: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    """Addresses as compiled code takes them, None for a tensor that is None. The caller keeps the tensors until that code has
    returned: a copy that only the argument holds is freed before, and its memory may be used again."""
    return tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])


#: What torch's own compiler allocates with, past the dispatcher, on the current device; where this torch has it.
_EMPTY: dict[str, Any] = {
    kind: function
    for kind in ("cpu", "cuda")
    if (function := getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)) is not None
}


def allocator(
    device: torch.device,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    strides: Any = None,
) -> Callable[[], Any]:
    """A function that makes new tensors of one shape and dtype, without gaps unless strides are given, at the least cost."""
    sizes = tuple(shape)
    steps = torch.empty(sizes, device="meta").stride() if strides is None else tuple(strides)
    past_dispatcher = _EMPTY.get(device.type)

    def by_dispatcher() -> Tensor:
        return torch.empty_strided(sizes, steps, dtype=dtype, device=device)

    if past_dispatcher is None:
        return by_dispatcher
    if device.type != "cuda":
        return lambda: past_dispatcher(sizes, steps, dtype)
    current, index = torch._C._cuda_getDevice, device.index
    return lambda: past_dispatcher(sizes, steps, dtype) if current() == index else by_dispatcher()
