"""What fast paths that are written in Python know a call again by, and how C does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.hardware._launcher import TensorPath
from scan_registry.ops.derivatives import OBSERVERS, PLAIN_TYPES, undisturbed

_enabled = torch.is_grad_enabled


def call_facts(
    tensors: tuple[Any, ...], on_gpu: Callable[[Tensor], bool]
) -> tuple[bool, list[Any]] | None:
    """Whether derivatives are recorded, and all that a plan depends on besides. None if these are no plain tensors on a GPU,
    or if the dispatcher would do more than find the kernels."""
    addresses, recording = 0, False
    facts: list[Any] = [0]
    try:
        if not on_gpu(tensors[0]) or not undisturbed():
            return None
        for tensor in tensors:
            if tensor is None:
                facts.append(None)
                continue
            if type(tensor) not in PLAIN_TYPES or tensor.is_neg():
                return None
            # Without an address a tensor is empty, or stands for zeros or for something else. A complex tensor may be a
            # lazy conjugate, but no plan takes complex tensors.
            address = tensor.data_ptr()
            if not address:
                return None
            addresses |= address
            recording = recording or tensor.requires_grad
            facts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    except (AttributeError, IndexError, RuntimeError):
        return None  # not tensors, none at all, or tensors without memory: the checks name them
    facts[0] = addresses & 15
    return recording and _enabled(), facts


def found_in_c(
    plan: Callable[..., Callable[..., Any]], count: int, marks: int = 0
) -> Callable[..., Any]:
    """A function of a flag and ``count`` tensors, some of them None, that runs the plan of such calls. If there is none,
    ``plan`` makes it from the same arguments. ``marks`` has a bit for each tensor that may be boolean. None if a tensor is not
    plain or records derivatives, or if the dispatcher would do more than find the kernels. Whether anything profiles, or takes
    forward-mode derivatives, is left to the caller."""
    return TensorPath(
        types=PLAIN_TYPES,
        tensor=torch._C.TensorBase,
        exchange=getattr(Tensor, "__dlpack_c_exchange_api__", None),
        observers=OBSERVERS,
        choice=policy.required.get,
        plan=plan,
        tracking=_enabled,
        count=count,
        aligned=(1 << count) - 1,
        marks=marks,
    ).run
