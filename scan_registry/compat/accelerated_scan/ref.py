"""Stands in for ``accelerated_scan.ref``: the scan over whatever multiplies and adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scan_registry.compat.arguments import as_flag
from scan_registry.kernels.linear_scan.op.function import linear_scan
from scan_registry.ops.checks import check_dense

Combine = Callable[[Tensor, Tensor], Tensor]
Like = Callable[[Tensor], Tensor]


def scan(
    gates: Tensor,
    tokens: Tensor,
    mul: Combine = torch.mul,
    add: Combine = torch.add,
    zeros_like: Like = torch.zeros_like,
    ones_like: Like = torch.ones_like,
    reverse: bool = False,
) -> Tensor:
    """h[t] = add(mul(gates[t], h[t-1]), tokens[t]) along the last dimension, from h[-1] = zeros_like.

    With the default operators this is ``linear_scan``, on any device. With others it is about
    2 log2(T) rounds of them over whole tensors, differentiable if they are: ``torch.add`` and
    ``torch.logaddexp`` scan logarithms, ``torch.add`` and ``torch.maximum`` find best paths. As
    ``accelerated_scan.ref.scan``, except that

    - T = 1 and T = 0 work, and with other operators ``reverse`` is right at every T (there it starts
      from ones and zeros beyond the end unless T is a power of two, whatever ``ones_like`` and
      ``zeros_like`` are);
    - gates multiply from the left throughout, so ``mul`` need not commute;
    - neither tensor has to be contiguous, and with the default operators narrow floats are computed in
      float32.

    Args:
        gates: (B, C, T).
        tokens: (B, C, T).
        mul: multiplies two tensors of shape (B, C, n), for any n; associative.
        add: adds two such tensors; associative, and ``mul`` distributes over it.
        zeros_like: called with one step of the tokens, (B, C, 1), gives the state before the first.
        ones_like: accepted for the signature's sake: no state depends on it, there or here.
        reverse: compute h[t] = add(mul(gates[t], h[t+1]), tokens[t]) instead.

    Returns:
        The states, (B, C, T).

    Raises:
        TypeError: an argument is not a tensor, an operator cannot be called, or ``reverse`` is no bool.
        ValueError: the tensors do not have three dimensions or differ in length.
    """
    reverse = as_flag("reverse", reverse)
    for name, value in (("gates", gates), ("tokens", tokens)):
        check_dense(name, value)
        if value.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be (B, C, T)")
    if gates.shape[-1] != tokens.shape[-1]:
        raise ValueError(
            f"gates have shape {tuple(gates.shape)}, tokens {tuple(tokens.shape)}; "
            "both must be (B, C, T) of one T"
        )
    operators: dict[str, Any] = {
        "mul": mul,
        "add": add,
        "zeros_like": zeros_like,
        "ones_like": ones_like,
    }
    for name, operator in operators.items():
        if not callable(operator):
            raise TypeError(f"{name} is {operator!r}; it must be a function")
    plain = mul is torch.mul and add is torch.add and zeros_like is torch.zeros_like
    if plain and all(t.is_floating_point() or t.is_complex() for t in (gates, tokens)):
        dtype = torch.promote_types(gates.dtype, tokens.dtype)
        return linear_scan(gates.to(dtype), tokens.to(dtype), reverse=reverse)
    if reverse:
        gates, tokens = gates.flip(-1), tokens.flip(-1)
    before = zeros_like(tokens[..., :1])
    first = add(mul(gates[..., :1], before), tokens[..., :1])
    if tokens.shape[-1] <= 1:
        return first
    rest = tokens[..., 1:].expand(*first.shape[:-1], -1)
    states = _inclusive(gates, torch.cat((first, rest), -1), mul, add)
    return states.flip(-1) if reverse else states


def _inclusive(gates: Tensor, tokens: Tensor, mul: Combine, add: Combine) -> Tensor:
    """The states, of which the first is the first token: what the first gate is does not matter.

    Composes neighbouring steps to half as many, whose states are those of every second step here;
    one step further each gives the others.
    """
    count = tokens.shape[-1]
    if count == 1:
        return tokens
    half = count // 2
    earlier_gates, later_gates = gates[..., : 2 * half : 2], gates[..., 1 : 2 * half : 2]
    earlier, later = tokens[..., : 2 * half : 2], tokens[..., 1 : 2 * half : 2]
    second = _inclusive(
        mul(later_gates, earlier_gates), add(mul(later_gates, earlier), later), mul, add
    )
    first = tokens[..., :1]
    if count > 2:
        others = second[..., : (count - 1) // 2]
        first = torch.cat((first, add(mul(gates[..., 2::2], others), tokens[..., 2::2])), -1)
    states = torch.stack((first[..., :half], second), -1).flatten(-2)
    return states if count == 2 * half else torch.cat((states, first[..., half:]), -1)
