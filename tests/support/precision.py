"""Dtypes to compute in, and what they round off."""

from __future__ import annotations

import torch
from torch import Tensor

#: Half a unit in the last place.
ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.complex64: 2.0**-24,
    torch.complex128: 2.0**-53,
}


def wide(tensor: Tensor) -> Tensor:
    """In float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the states that the package keeps between steps."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
