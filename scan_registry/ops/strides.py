"""Strides of tensors without gaps, and of new tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scan_registry.base.symbols import surely_contiguous


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for ``shape``, with the dimensions from outermost to innermost as given."""
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        size = shape[dimension]
        # A symbol of torch.compile stands for a size whose value may not be known yet.
        step *= max(1, size) if isinstance(size, int) else size
    return tuple(strides)


def memory_order(strides: Sequence[int]) -> list[int]:
    """The dimensions from outermost to innermost."""
    return sorted(range(len(strides)), key=lambda d: strides[d], reverse=True)


def as_new(model: Tensor) -> Tensor:
    """A tensor with the shape, strides and dtype of a new one like ``model``."""
    return model if surely_contiguous(model) else torch.empty_like(model, device="meta")


def lying_as_new(model: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with the strides of ``empty_like(model)``, copied if it has others."""
    if tensor.stride() == as_new(model).stride():
        return tensor
    return torch.empty_like(model, dtype=tensor.dtype).copy_(tensor)
