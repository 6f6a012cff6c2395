"""What the kernel of state_rows computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def slots_of(pool: Tensor, indices: Tensor, pad_slot: int) -> Tensor:
    """Which indices stand for a row of the pool."""
    return (indices >= 0) & (indices < pool.shape[0]) & (indices != pad_slot)


def gather(pool: Tensor, indices: Tensor, pad_slot: int = -1) -> Tensor:
    """The rows; zeros where an index stands for none."""
    there = slots_of(pool, indices, pad_slot)
    states = pool.new_zeros((indices.shape[0], *pool.shape[1:]))
    states[there] = pool[indices[there].long()]
    return states


def scatter(pool: Tensor, states: Tensor, indices: Tensor, pad_slot: int = -1) -> Tensor:
    """The pool with the states in its rows, a copy."""
    there = slots_of(pool, indices, pad_slot)
    changed = torch.clone(pool)
    changed[indices[there].long()] = states[there]
    return changed
