"""Conditions on sizes that may be symbolic under torch.compile, such as the length of ``nonzero``'s result.

A plain ``if`` would need a symbol's value, which is known only when the compiled function runs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

_tracing = torch.compiler.is_dynamo_compiling


def surely(condition: Any) -> bool:
    """Whether it holds; False where that depends on values not known yet."""
    if _tracing() or isinstance(condition, torch.SymBool):
        return _guarded(condition, False)
    return bool(condition)


def perhaps(condition: Any) -> bool:
    """Whether it holds; True where that depends on values not known yet."""
    if _tracing() or isinstance(condition, torch.SymBool):
        return _guarded(condition, True)
    return bool(condition)


def _guarded(condition: Any, otherwise: bool) -> bool:
    """Whether a symbolic condition holds; ``otherwise`` where that depends on values not known yet.

    While a release of torch without ``guard_or_false`` and ``guard_or_true`` traces Python, it takes an unknown size to be 2 or
    more, and raises if that does not decide the condition.
    """
    from torch.fx.experimental import symbolic_shapes

    if hasattr(symbolic_shapes, "guard_or_false"):
        if otherwise:
            return symbolic_shapes.guard_or_true(condition)
        return symbolic_shapes.guard_or_false(condition)
    if _tracing():
        return symbolic_shapes.guard_size_oblivious(condition)
    return bool(condition) if condition.node.has_hint() else otherwise


def decided(condition: Any, otherwise: bool) -> bool:
    """Whether it holds; ``otherwise`` where that depends on values not known yet."""
    return surely(condition) or (otherwise and perhaps(condition))


def time_before_batch(tensor: torch.Tensor) -> bool:
    """Whether a tensor (B, T, …) without gaps has time before batch in memory.

    If the comparison cannot be decided and the batch's stride is a number, the stride of time counts as the larger
    one, since it is a multiple of the unknown batch size. That is wrong for batches of 0 and 1 only, which have
    no order. If the batch's stride is symbolic, batch is taken to come first.
    """
    between_batches, between_times = tensor.stride(0), tensor.stride(1)
    return decided(between_times > between_batches, otherwise=isinstance(between_batches, int))


def surely_contiguous(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in order and without gaps; False where that depends on values not known yet."""
    if all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
        return tensor.is_contiguous()
    step: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not (surely(size == 1) or surely(stride == step)):
            return False
        step = step * size
    return True


def numbers(sizes: Any) -> Any:
    """The sizes, as ints where torch.jit.trace has tensors in their place, as it has of every shape.

    The trace then has them as constants. torch would warn of each.
    """
    if _tracing() or not any(isinstance(size, torch.Tensor) for size in sizes):
        return sizes
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Converting a tensor to a Python")
        return tuple(map(int, sizes))


def same_shape(one: Any, other: Any) -> bool:
    """Whether two shapes are surely the same."""
    if len(one) != len(other):
        return False
    return all(surely(a == b) for a, b in zip(numbers(one), numbers(other), strict=True))
