"""Linear maps between real features and complex states, as one product of real matrices: a complex tensor lies in memory
as pairs of real numbers, so nothing is copied."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from scan_registry.nn.layer import wide


def weight_into(real: Tensor, imag: Tensor) -> Tensor:
    """(2 · N, D) of the parts (N, D) of a complex matrix: rows are the pairs of the result."""
    return torch.stack([real, imag], 1).flatten(0, 1)


def weight_from(real: Tensor, imag: Tensor) -> Tensor:
    """(D, 2 · N) of the parts (D, N): what maps pairs to the real part of the complex product."""
    return torch.stack([real, -imag], -1).flatten(1)


def into_complex(x: Tensor, weight: Tensor) -> Tensor:
    """(..., N), complex64 or complex128, of real features (..., D) and ``weight_into``'s matrix."""
    pairs = wide(linear(x, weight.to(x.dtype)))
    return torch.view_as_complex(pairs.unflatten(-1, (-1, 2)))


def from_complex(states: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """(..., D), real and of the dtype of ``like``, of states (..., N) and ``weight_from``'s matrix."""
    pairs = torch.view_as_real(states).flatten(-2).to(like.dtype)
    return linear(pairs, weight.to(like.dtype))
