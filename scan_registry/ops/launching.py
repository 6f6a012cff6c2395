"""What operators keep from one call to the next: plans, and functions that launch what was prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from scan_registry.runtime.loader import Prepared

_MOST_PLANS = 4096  # past that the oldest half goes

Key = TypeVar("Key")
Kept = TypeVar("Kept")
Plan = Callable[..., Any]
#: Runs a kernel on tensors by the names of its pointers; those that are not there are null.
Run = Callable[[Mapping[str, Tensor | None]], None]


def remember(plans: dict[Key, Kept], key: Key, plan: Kept) -> Kept:
    """Keep a plan, and not too many."""
    if len(plans) >= _MOST_PLANS:
        for old in list(plans)[: _MOST_PLANS // 2]:
            plans.pop(old, None)
    plans[key] = plan
    return plan


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
