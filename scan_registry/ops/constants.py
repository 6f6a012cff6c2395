"""Constants in a GPU's memory, made once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.ops.recording import is_capturing

_zeros: dict[tuple[Any, ...], Tensor] = {}


def zeros(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Zeros of a shape, which nobody may write to. They are never freed: a CUDA graph may read them at any time."""
    key = device, dtype, shape
    cached = _zeros.get(key)
    if cached is not None:
        return cached
    with torch.inference_mode(False):
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    if is_capturing(tensor):
        return tensor  # They are zeros only while that graph runs.
    if tensor.is_cuda:
        torch.cuda.current_stream(device).synchronize()  # Others read them on other streams.
    return _zeros.setdefault(key, tensor)
