"""Strides of tensors without gaps, in elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides without gaps for ``shape``, with the dimensions from outermost to innermost as given; by default in order."""
    strides, step = [0] * len(shape), 1
    for dimension in reversed(range(len(shape)) if order is None else order):
        strides[dimension] = step
        size = shape[dimension]
        # A symbol of torch.compile stands for a size whose value may not be known yet.
        step *= max(1, size) if isinstance(size, int) else size
    return tuple(strides)


def stride_names(strided: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """``x_batch`` and so on: the strides of tensors' dimensions, in order, as parameters of kernels are called."""
    return tuple(f"{name}_{axis}" for name, dimensions in strided.items() for axis in dimensions)


def memory_order(strides: Sequence[int]) -> list[int]:
    """The dimensions from outermost to innermost."""
    return sorted(range(len(strides)), key=lambda d: strides[d], reverse=True)
