"""Tensors that lie in memory in other ways than usual."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: How (batch, channels, time) lies in memory: time or channels without gaps, or neither; off 16 bytes.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "time last": torch.Tensor.contiguous,
    "channel last": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "misaligned": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "batch last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
}


def memory(*shape: int, dtype: torch.dtype = torch.float32, off: int = 0) -> Tensor:
    """Zeros that start at a multiple of 16 bytes, or ``off`` elements behind one."""
    room = torch.zeros(torch.Size(shape).numel() + 16, dtype=dtype)
    first = -room.data_ptr() // room.element_size() % 16 + off
    return room[first:][: torch.Size(shape).numel()].view(shape)
