"""The same numbers in memory of another layout."""

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
