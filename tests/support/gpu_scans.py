"""Inputs of linear scans on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DEVICE = "cuda"


def inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    grad: bool = True,
    gates: Sequence[int] | None = None,
) -> list[Tensor]:
    """Gates, of another shape if that is given, and tokens."""
    decays = 1 - torch.rand(*(gates or shape), device=DEVICE) ** 3
    tensors = decays.to(dtype), torch.randn(*shape, device=DEVICE).to(dtype)
    return [t.requires_grad_(grad) for t in tensors]


def with_states(
    *shape: int, dim: int, packed: bool, gates: Sequence[int] | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Gates, tokens and initial states; bounds, or None."""
    tensors = inputs(*shape, gates=gates)
    bounds = None
    of_state = [*shape]
    del of_state[dim]
    if packed:
        time = shape[dim]
        bounds = torch.tensor([0, 0, 3, time // 2, time // 2, time], device=DEVICE)
        of_state.insert(dim % len(shape), len(bounds) - 1)
    return [*tensors, torch.randn(of_state, device=DEVICE, requires_grad=True)], bounds
