"""What the families' cases share: how far off a result is."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; infinite where ``out`` holds a NaN."""
    error = (out.detach().to(expected.dtype) - expected).norm() / expected.norm().clamp_min(1e-30)
    return float(error.nan_to_num(nan=torch.inf))
