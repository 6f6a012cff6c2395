"""What the families' cases share: how far off a result is."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(out: Tensor, expected: Tensor, among: Tensor | None = None) -> float:
    """‖out − expected‖ / ‖expected‖; infinite where ``out`` holds a NaN. What is expected may be a few numbers
    that happen to cancel, of the size of those ``among`` which they are: then that size counts."""
    size = expected.norm()
    if among is not None:
        size = torch.maximum(size, among.norm() * (expected.numel() / among.numel()) ** 0.5)
    error = (out.detach().to(expected.dtype) - expected).norm() / size.clamp_min(1e-30)
    return float(error.nan_to_num(nan=torch.inf))
