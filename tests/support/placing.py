"""Tensors that lie in memory in other ways than usual."""

from __future__ import annotations

import torch
from torch import Tensor


def memory(*shape: int, dtype: torch.dtype = torch.float32, off: int = 0) -> Tensor:
    """Zeros that start at a multiple of 16 bytes, or ``off`` elements behind one."""
    room = torch.zeros(torch.Size(shape).numel() + 16, dtype=dtype)
    first = -room.data_ptr() // room.element_size() % 16 + off
    return room[first:][: torch.Size(shape).numel()].view(shape)
