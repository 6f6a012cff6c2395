"""Gradients of a function that is composed of torch's operators: it is computed once more, and autograd differentiates it.

Operators whose kernels have no second derivative use this. Nothing but the arguments is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

#: Results, each with the gradient that reaches it.
Pairs = Iterable[tuple[Tensor | None, Tensor | None]]


def gradients(
    tensors: Sequence[Tensor | None],
    wanted: Sequence[bool],
    recompute: Callable[[list[Any], bool], Pairs],
) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, of ``tensors``; None for the others, and for a tensor that is None. The gradients are
    differentiable themselves where derivatives are recorded.

    recompute  the tensors to differentiate by, in the place of ``tensors``, and whether derivatives are recorded ->
               results and their gradients; pairs with a None are left out
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves: list[Any] = [
            None if t is None else _leaf(t, want, recorded)
            for t, want in zip(tensors, wanted, strict=True)
        ]
        places = [k for k, t in enumerate(leaves) if wanted[k] and t is not None]
        sources = [leaves[k] for k in places]
        pairs = [
            (x, g.to(x.dtype))
            for x, g in recompute(leaves, recorded)
            if x is not None and g is not None and x.requires_grad
        ]
        by_place = dict(zip(places, _grad(pairs, sources, recorded), strict=True))
    return tuple(by_place.get(k) for k in range(len(leaves)))


def _grad(
    pairs: list[tuple[Tensor, Tensor]], sources: list[Tensor], recorded: bool
) -> tuple[Tensor, ...]:
    if not pairs or not sources:
        return tuple(torch.zeros_like(t) for t in sources)
    results, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(
        results, sources, grads, create_graph=recorded, materialize_grads=True
    )


def _leaf(tensor: Tensor, want: bool, recorded: bool) -> Tensor:
    """The tensor that takes an argument's place in the recomputation. One argument may be computed from another, such as
    gates from an input. So where derivatives are recorded, an alias takes each argument's place: the gradient of the input
    then leaves out what flows through the gates, which autograd adds later."""
    if recorded and tensor.requires_grad:
        return tensor.view_as(tensor)
    alone = tensor.detach()
    return alone.requires_grad_() if want else alone
