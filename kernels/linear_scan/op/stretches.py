"""A linear scan whose states start anew where ``reset`` says so, in operators that torch differentiates.

A gate of zero would pass on a state that is not finite, since zero times infinity is NaN. So the batches are put one after the
other into a single packed scan, and a sequence of it ends before each reset. The bounds have one entry for each step, and
entries between two resets are equal: the sequences between equal bounds are empty. So the number of sequences does not depend
on the values of ``reset``, and the CPU does not wait for the GPU to read them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.linear_scan.op import autograd as derivatives
from scan_registry.kernels.linear_scan.op.arguments import Options
from scan_registry.kernels.linear_scan.reference import compute_dtype


def batch_dim(rank: int, dim: int) -> int:
    """The dimension that ``reset`` has beside time: the first other one. ``rank`` is 2 at least."""
    return 1 if dim % rank == 0 else 0


def reset_shape(shape: Any, dim: int) -> tuple[int, ...]:
    """What ``reset`` of a scan over tensors of ``shape`` has: batch and time; time alone, where there is no more."""
    rank = len(shape)
    return (shape[dim],) if rank == 1 else (shape[batch_dim(rank, dim)], shape[dim])


def stretches(tokens: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Gates, tokens, bounds and options of the one scan that ``scan`` makes of such tokens, on meta."""
    others = [n for d, n in enumerate(tokens.shape) if d != options.dim % tokens.dim()]
    if others:
        del others[0]  # the batch
    steps = tokens.numel() // math.prod(others)
    x = torch.empty(steps, *others, dtype=compute_dtype(tokens.dtype), device="meta")
    cu_seqlens = torch.empty(steps + 1, dtype=torch.int64, device="meta")
    return x, x, cu_seqlens, Options(-x.dim(), options.reverse, False, options.backend)


def scan(
    gates: Tensor,
    tokens: Tensor,
    reset: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor | None]:
    """States and, if asked for, the final state, of ``arguments.normalised`` arguments."""
    if tokens.numel() == 0:
        return derivatives.scan(gates, tokens, initial_state, cu_seqlens, options)
    dtype, compute = tokens.dtype, compute_dtype(tokens.dtype)
    rank = tokens.dim()
    gates, tokens = gates.to(compute).expand(tokens.shape), tokens.to(compute)
    if rank == 1:
        gates, tokens, reset = gates.unsqueeze(0), tokens.unsqueeze(0), reset.unsqueeze(0)
        initial_state = None if initial_state is None else initial_state.unsqueeze(0)
        places = 0, 1
    else:
        places = batch_dim(rank, options.dim), options.dim % rank
    gates, tokens = gates.movedim(places, (0, 1)), tokens.movedim(places, (0, 1))
    if initial_state is not None:
        packed = cu_seqlens is not None
        initial_state = (
            initial_state.movedim(places, (0, 1)) if packed else initial_state.unsqueeze(1)
        )
    states, final_state = _scan(gates, tokens, reset, initial_state, cu_seqlens, options)
    states = states.movedim((0, 1), places)
    if final_state is not None:
        packed = cu_seqlens is not None
        final_state = final_state.movedim((0, 1), places) if packed else final_state.squeeze(1)
    if rank == 1:
        states = states.squeeze(0)
        final_state = None if final_state is None else final_state.squeeze(0)
    return states.to(dtype), final_state


def _scan(
    gates: Tensor,
    tokens: Tensor,
    reset: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor | None]:
    """The same of (batch, time, …); states before and after have as many sequences in place of time."""
    batch, time, *rest = tokens.shape
    device, reverse = tokens.device, options.reverse
    along = (batch, time, *(1 for _ in rest))
    restarts = reset.view(along) if reset.is_contiguous() else reset.reshape(along)
    # A gate there is of no account, whatever it is.
    gates = torch.where(restarts, 0, gates)
    if cu_seqlens is None:
        number, first = None, torch.arange(time, device=device) == (time - 1 if reverse else 0)
    else:
        number, first = derivatives.sequences_of_steps(cu_seqlens, time, reverse)
    if initial is not None:
        # What enters a sequence becomes part of its first token, unless it starts anew there.
        entering = initial if number is None else initial.index_select(1, number)
        enters = first.view(1, time, *(1 for _ in rest)) & ~restarts
        tokens = tokens + torch.where(enters, gates, 0) * torch.where(enters, entering, 0)
    begins = (reset | first).flatten()
    places = torch.arange(batch * time, device=device)
    zero = places.new_zeros(1)
    if reverse:  # a stretch ends, in memory, where the walk begins
        cuts = torch.cat([zero, torch.where(begins, places + 1, 0).cummax(0).values])
    else:
        ends = places.new_full((1,), batch * time)
        cuts = torch.cat([torch.where(begins, places, 0).cummax(0).values, ends])
    of_stretches = Options(-(len(rest) + 1), reverse, False, options.backend)
    states, _ = derivatives.scan(
        gates.flatten(0, 1), tokens.flatten(0, 1), None, cuts, of_stretches
    )
    states = states.unflatten(0, (batch, time))
    return states, _last(states, initial, cu_seqlens, reverse) if options.final else None


def _last(states: Tensor, initial: Any, cu_seqlens: Tensor | None, reverse: bool) -> Tensor:
    """The state after each sequence; what enters those without steps. It shares no memory with the states, or it would keep
    all of them, and change where they are changed."""
    time = states.shape[1]
    if cu_seqlens is None:
        return states.narrow(1, 0 if reverse else time - 1, 1).clone()
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    last = states.index_select(1, (begin if reverse else end - 1).clamp(0, time - 1))
    nonempty = (begin < end).view(1, -1, *(1 for _ in states.shape[2:]))
    return torch.where(nonempty, last, 0 if initial is None else initial)
