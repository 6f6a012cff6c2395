"""Chunks: a rank's part of a selective scan, cut along time so that a kernel works on all chunks at once.

A kernel works on the steps of a row (a channel of a batch's sequence) one after another, so few rows leave a GPU idle. If the
state before each chunk is known, chunks are rows like any other. ``chunked`` lays them along the batch, as views.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.problem import INTERVAL
from scan_registry.ops import selective_scan_plans as plans
from scan_registry.ops.selective_scan_arguments import Arguments, Options

#: With so many rows an H100's time for an element is the shortest: 7.6 ps for 16,384 rows of 16 states in bfloat16, 14 ps for
#: 5,120 (kernels/selective_scan/notes).
FULL = 16_384
#: The most chunks, and the fewest steps of one.
MOST, SHORTEST = 8, 8 * INTERVAL
#: Step sizes are added up so many elements at a time, which an H100's L2 cache holds.
_AT_ONCE = 1 << 22


def chunk_count(given: Arguments) -> int:
    """How many chunks there are: a power of two, so that chunks are views and have whole tiles."""
    batch, channels, time = given.u.shape
    rows, count = batch * channels, 1
    if not given.u.is_cuda or not rows:
        return 1
    sequences = [t for t in (given.u, given.delta, given.z) if t is not None]
    while (
        2 * count <= MOST
        and rows * count < FULL
        and time % (2 * count * INTERVAL) == 0
        and time // (2 * count) >= SHORTEST
        and all(_divides(x, 2 * count) for x in sequences)
    ):
        count *= 2
    return count


def _divides(x: Tensor, count: int) -> bool:
    """Whether the chunks of all batches lie at equal distances."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[-1] * x.stride(-1)


def chunked(x: Tensor, count: int) -> Tensor:
    """(batch, …, time) as (batch · count, …, time / count)."""
    return x if count == 1 else x.unflatten(-1, (count, -1)).movedim(-2, 1).flatten(0, 1)


def joined(x: Tensor, count: int) -> Tensor:
    """The opposite of ``chunked``."""
    return x if count == 1 else x.unflatten(0, (-1, count)).movedim(1, -2).flatten(-2)


def chunks_of(given: Arguments, count: int, entered: Tensor | None) -> Arguments:
    """The arguments of all chunks. ``entered`` are the states before them, (batch · count, channels, states)."""
    u, delta, A, B, C, D, z, bias, _, bounds = given

    def cut(x: Any) -> Any:
        return x if x is None or x.dim() == 2 else chunked(x, count)

    return Arguments(cut(u), cut(delta), A, cut(B), cut(C), D, cut(z), bias, entered, bounds)


def of_whole(found: Any, given: Arguments, count: int) -> tuple[Tensor | None, ...]:
    """The gradients of ``given``, from those of all chunks. That of the state before is the first chunk's."""
    made: list[Tensor | None] = []
    names = Arguments._fields
    for name, grad, x in zip(names, found, given.differentiable, strict=False):
        if grad is None or x is None:
            made.append(None)
        elif name == "initial_state":
            made.append(grad.unflatten(0, (-1, count))[:, 0])
        else:
            made.append(
                grad if x.dim() == 2 or name in ("D", "delta_bias") else joined(grad, count)
            )
    return tuple(made)


def decays(sizes: Tensor, A: Tensor) -> Tensor:
    """The products of the gates of steps whose sizes add up to ``sizes``, (…, channels)."""
    return torch.exp(sizes.unsqueeze(-1) * A)


def summed_sizes(given: Arguments, options: Options) -> Tensor:
    """The sums of the step sizes, (batch, channels), in the computation's dtype. With softplus a kernel adds them up on a GPU,
    unless no kernel takes the arguments."""
    delta, bias = given.delta, given.delta_bias
    compute = reference.compute_dtype(delta.dtype)
    if not options.softplus:
        total: Tensor = delta.sum(-1, dtype=compute)
        return total if bias is None else total + delta.shape[-1] * bias.to(compute)
    by_kernel = plans.sizes(given, options)
    if by_kernel is not None:
        return by_kernel
    batch, channels, time = delta.shape
    found = torch.empty(batch, channels, dtype=compute, device=delta.device)
    width = max(1, _AT_ONCE // max(1, batch * time))
    for begin in range(0, channels, width):
        end = min(channels, begin + width)
        sizes = delta[:, begin:end]
        # One operation makes both the sum with the bias and the conversion.
        wide = sizes.to(compute) if bias is None else sizes + bias[begin:end, None].to(compute)
        torch.sum(functional.softplus(wide, threshold=20.0), -1, out=found[:, begin:end])
    return found


def total(products: Tensor, totals: Tensor, *, backward: bool = False) -> Tensor:
    """The state that leaves the last chunk, from zero before the first, as of ``entering``."""
    count = products.shape[1]
    first, *others = reversed(range(count)) if backward else range(count)
    state = totals[:, first]
    for chunk in others:
        state = torch.addcmul(totals[:, chunk], products[:, chunk], state)
    return state


def entering(
    products: Tensor, totals: Tensor, before: Tensor | None, *, backward: bool = False
) -> Tensor:
    """The states that enter the chunks, (batch, count, channels, states).

    From ``before``, or zero, a chunk makes ``products · before + totals``, both of the result's shape. ``backward``: the
    last chunk is the first.
    """
    order = [*range(products.shape[1])]
    if backward:
        order.reverse()
    state = torch.zeros_like(totals[:, 0]) if before is None else before
    states = [state] * len(order)
    for chunk, following in pairwise(order):
        state = torch.addcmul(totals[:, chunk], products[:, chunk], state)
        states[following] = state
    return torch.stack(states, 1)
