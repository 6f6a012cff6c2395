"""States of recurrent networks, as modules take them and as their operator does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

States = list[Tensor]


def batched(states: States | None, batch: int | None) -> States | None:
    """States with a batch dimension, which is added if ``batch`` is None."""
    return states if states is None or batch is not None else [s.unsqueeze(1) for s in states]


def as_tensors(states: Any, count: int) -> tuple[Tensor, ...] | None:
    """States as users give them, as a tuple of so many tensors; None if they are anything else."""
    sequence = (states,) if count == 1 else states
    if not isinstance(sequence, (tuple, list)) or len(sequence) != count:
        return None
    return (*sequence,) if all(isinstance(state, Tensor) for state in sequence) else None


def by_heads(states: States, lead: tuple[int, int], dim: int) -> Tensor:
    """The states (directions, B, H) as the operator takes them."""
    return torch.stack([state.transpose(0, 1).reshape(*lead, -1, dim) for state in states])


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """All parts in one tensor: the part itself if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def as_given(states: States) -> Any:
    """States as users get them: a tuple if there are several."""
    return states[0] if len(states) == 1 else tuple(states)
