"""Calls of a kind that was checked and planned before: they go from their arguments to the plan.

Checks take longer than a launch. Their result depends on the facts that a plan depends on, and otherwise only on the
values of ``cu_seqlens``, if these are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scan_registry.dispatch import policy
from scan_registry.ops.derivatives import unobserved

#: The key of a call.
Key = tuple[Any, ...]
Plan = Callable[..., Any]

_is_compiling = torch.compiler.is_compiling
_required = policy.required.get


def key_of(what: str, tensors: Sequence[Any], options: tuple[Any, ...]) -> Key | None:
    """All that the checks of a call and its plan depend on. None if they depend on more, or if the dispatcher has to see
    the call."""
    if _is_compiling() or not unobserved(*tensors):
        return None
    facts: list[Any] = []
    addresses = 0
    for tensor in tensors:
        if tensor is None:
            facts.append(None)
        elif tensor.layout is not torch.strided:
            return None
        else:
            facts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
            addresses |= tensor.data_ptr()
    for option in options:
        if option is not None and type(option) not in (str, bool):
            return None
    return (what, addresses & 15, _required(), options, *facts)


def taken_as_they_are(given: Sequence[Any], tensors: Sequence[Any]) -> bool:
    """Whether no check has converted anything."""
    return all(one is other for one, other in zip(given, tensors, strict=True))
