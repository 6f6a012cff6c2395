"""What operators keep from one call to the next: plans, and functions that launch what was prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.runtime.loader import Prepared

MOST_PLANS = 4096

#: What a call does to its tensors, with all decided that depends on no values.
Plan = Callable[..., Any]
#: Runs a kernel on tensors by the names of its pointers; those that are not there are null.
Run = Callable[[Mapping[str, Tensor | None]], None]


_required = policy.required.get


class PlanCache:
    """Plans, each for all calls that agree in what it depends on.

    That is which tensors are there, with their shapes, strides, dtypes and devices; how far all of their addresses
    are aligned, up to 16 bytes; the options; and what ``require`` allows. A plan stays as it was made: what is
    installed or tuned later counts for calls of another kind. Past ``MOST_PLANS`` all plans go.
    ``csrc/plans.h`` keeps those of the fast path by the same rules.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def run(
        self, make: Callable[..., Plan], tensors: Sequence[Tensor | None], *options: object
    ) -> Any:
        """What the plan makes of the tensors. ``make`` plans the first call of a kind, from both."""
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


#: Of all operators.
plan_cache = PlanCache()


def address(tensor: Tensor | None) -> int | None:
    """Of a tensor's first element; None, which is null, where there is none."""
    return None if tensor is None else tensor.data_ptr()


def launcher(ready: Prepared, names: Sequence[str], device: torch.device) -> Run:
    """A function that launches, on the current stream, what is ready with a kernel for ``device``.
    ``names`` are the kernel's pointers."""
    assert ready.launch is not None
    launch, workspace, ordinal = ready.launch.run, ready.workspace, device.index
    place = names.index("workspace") if workspace else -1
    stream = torch._C._cuda_getCurrentRawStream

    def run(tensors: Mapping[str, Tensor | None]) -> None:
        pointers = [address(tensors.get(name)) for name in names]
        scratch = None
        if workspace:
            scratch = torch.empty(workspace, dtype=torch.uint8, device=device)
            pointers[place] = scratch.data_ptr()
        if status := launch(stream(ordinal), *pointers):
            ready.refuse(status)

    return run
