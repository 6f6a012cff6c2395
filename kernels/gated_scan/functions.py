"""Elementwise functions in torch that several kinds use. Their derivatives are as exact as their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Sigmoids(torch.autograd.Function):
    """The sigmoids of x and of -x. The derivative of each is the product of both, up to the sign. Torch's own derivative of a
    sigmoid y is y * (1 - y), which rounds to 0 where y is close to 1."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sigmoid(), (-x).sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, of_one: Tensor, of_other: Tensor) -> Tensor:
        one, other = ctx.saved_tensors
        of_x: Tensor = (of_one - of_other) * (one * other)
        return of_x

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        one, other = ctx.saved_tensors
        moved = tangent * (one * other)
        return moved, -moved


def sigmoids(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sigmoids of x and of -x. Neither is computed as 1 minus the other, which would lose digits."""
    if torch._C._are_functorch_transforms_active():
        return _transformed(x)
    if not torch.is_grad_enabled():
        return x.sigmoid(), (-x).sigmoid()
    one, other = _Sigmoids.apply(x)  # type: ignore[no-untyped-call]
    return one, other


def _transformed(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same in operators that ``torch.func`` transforms, at several times the cost. ``torch.func`` cannot transform an
    autograd function that an operator's implementation calls. The smaller of both sigmoids has an exact derivative."""
    one, other = x.sigmoid(), (-x).sigmoid()
    negative = x < 0
    return torch.where(negative, one, 1 - other), torch.where(negative, 1 - one, other)
