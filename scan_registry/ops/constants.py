"""Constants in a GPU's memory, made once."""

from __future__ import annotations

import torch
from torch import Tensor

from scan_registry.ops.recording import is_capturing

_zeros: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}


def zeros(device: torch.device, dtype: torch.dtype, count: int) -> Tensor:
    """That many zeros, which nobody may write to. They are never freed: a CUDA graph may read them at any time."""
    found = _zeros.get((device, dtype, count))
    if found is not None:
        return found
    with torch.inference_mode(False):
        made = torch.zeros(count, dtype=dtype, device=device)
    if is_capturing(made):
        return made  # They are zeros only while that graph runs.
    if made.is_cuda:
        torch.cuda.current_stream(device).synchronize()  # Others read them on other streams.
    return _zeros.setdefault((device, dtype, count), made)
