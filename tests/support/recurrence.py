"""The recurrence of ``linear_scan`` as its docstring has it. Shares no code with the package."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from precision import wide
from torch import Tensor


def plainly(
    gates: Tensor, tokens: Tensor, initial_state: Tensor | None = None, *, dim: int = -1,
    reverse: bool = False, cu_seqlens: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States and final states, step by step in float64 or complex128, in operators that torch differentiates."""
    gates, tokens = torch.broadcast_tensors(wide(gates), wide(tokens))
    dtype = torch.promote_types(gates.dtype, tokens.dtype)
    gates, tokens = gates.to(dtype), tokens.to(dtype)
    dim %= tokens.dim()
    bounds = [0, tokens.shape[dim]]
    of_state = [*tokens.shape[:dim], *tokens.shape[dim + 1 :]]
    if cu_seqlens is not None:
        bounds = torch.as_tensor(cu_seqlens).tolist()
        of_state.insert(dim, len(bounds) - 1)
    start = tokens.new_zeros(()) if initial_state is None else initial_state.to(dtype)
    start = start.expand(of_state)
    states = [start] * tokens.shape[dim]
    ends = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        x = start if cu_seqlens is None else start.select(dim, number)
        for t in reversed(range(begin, end)) if reverse else range(begin, end):
            x = gates.select(dim, t) * x + tokens.select(dim, t)
            states[t] = x
        ends.append(x)
    together = torch.stack(states, dim) if states else torch.zeros_like(tokens)
    return together, ends[0] if cu_seqlens is None else torch.stack(ends, dim)
