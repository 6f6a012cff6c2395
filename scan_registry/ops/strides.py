"""Strides of new tensors of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from scan_registry.base.symbols import surely_contiguous


def as_new(model: Tensor) -> Tensor:
    """A tensor with the shape, strides and dtype of a new one like ``model``."""
    return model if surely_contiguous(model) else torch.empty_like(model, device="meta")


def lying_as_new(model: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with the strides of ``empty_like(model)``, copied if it has others."""
    if tensor.stride() == as_new(model).stride():
        return tensor
    return torch.empty_like(model, dtype=tensor.dtype).copy_(tensor)
