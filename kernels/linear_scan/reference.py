"""linear_scan in plain torch: what the kernels are tested and attested against, and run when none fits.

The recurrence x[t] = gates[t] * x[t-1] + tokens[t] and its reverse-mode derivative, one step after
the other in the dtype asked for. Sequential on purpose: no rounding but the recurrence's own.

Shapes: tokens and states have one shape; gates broadcast to it. A state is that shape without
``dim``; where sequences are packed along ``dim``, it is that shape with ``dim`` counting sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

_ITSELF = (torch.float64, torch.complex64, torch.complex128)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the recurrence is computed in, and the dtype of a final state: float32 for the narrow
    floats, as in the kernels."""
    return dtype if dtype in _ITSELF else torch.float32


def states_dtype(gates: torch.dtype, tokens: torch.dtype) -> torch.dtype:
    """The dtype of the states: that of the tokens, or the complex one if gates are complex."""
    return gates if gates.is_complex and not tokens.is_complex else tokens


def state_shape(shape: Sequence[int], dim: int, sequences: int | None) -> tuple[int, ...]:
    """Shape of the states before and after the scan; ``dim`` is not negative."""
    between = () if sequences is None else (sequences,)
    return (*shape[:dim], *between, *shape[dim + 1 :])


def _bounds(cu_seqlens: Tensor | None, time: int) -> list[tuple[int, int]]:
    if cu_seqlens is None:
        return [(0, time)]
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != time or ends != sorted(ends):
        raise ValueError(f"cu_seqlens is {ends}; it must rise from 0 to the {time} steps of tokens")
    return list(pairwise(ends))


def _steps(begin: int, end: int, reverse: bool) -> range:
    return range(begin, end)[:: -1 if reverse else 1]


def _states_of(state: Tensor | None, like: Tensor, dim: int, count: int, packed: bool) -> Tensor:
    """``state``, or zeros, with ``dim`` counting sequences, whether packed or one."""
    shape = state_shape(like.shape, dim, count if packed else None)
    compute = compute_dtype(like.dtype)
    if state is None:
        wide = torch.zeros(shape, dtype=compute, device=like.device)
    else:
        wide = state.to(compute).broadcast_to(shape).clone()
    return wide if packed else wide.unsqueeze(dim)


def forward(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None = None,
    *,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States x of the recurrence along ``dim``, and the states after the last steps.

    initial_state: broadcasts to the state's shape; zero if None. reverse: x[t] follows from x[t+1].
    cu_seqlens: bounds of the packed sequences, from 0 to the length of ``dim``; else ``ValueError``.
    Returns states in ``states_dtype`` and the final state in the dtype they are computed in.
    """
    dim %= tokens.dim()
    dtype = states_dtype(gates.dtype, tokens.dtype)
    compute = compute_dtype(dtype)
    states = torch.empty_like(tokens, dtype=compute)
    bounds = _bounds(cu_seqlens, tokens.shape[dim])
    ends = _states_of(initial_state, states, dim, len(bounds), cu_seqlens is not None)
    gate = gates.to(compute).broadcast_to(tokens.shape).unbind(dim)
    token, out = tokens.to(compute).unbind(dim), states.unbind(dim)
    for (begin, end), x_end in zip(bounds, ends.unbind(dim), strict=True):
        x = x_end
        for t in _steps(begin, end, reverse):
            x = torch.addcmul(token[t], gate[t], x, out=out[t])
        x_end.copy_(x)
    return states.to(dtype), ends if cu_seqlens is not None else ends.squeeze(dim)


def summary(
    gates: Tensor, tokens: Tensor, *, dim: int = -1, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The product of all gates along ``dim``, and the final state from a state of zero, in the dtype that states are
    computed in."""
    return product(gates, tokens, dim), forward(gates, tokens, dim=dim, reverse=reverse)[1]


def product(gates: Tensor, tokens: Tensor, dim: int) -> Tensor:
    """The product of all gates along ``dim``, as they broadcast to ``tokens``. Rounding errors of many like factors add
    up, so it is formed in a wider dtype."""
    compute = compute_dtype(states_dtype(gates.dtype, tokens.dtype))
    wide = torch.complex128 if compute.is_complex else torch.float64
    return gates.broadcast_to(tokens.shape).prod(dim, dtype=wide).to(compute)


def preceding(
    states: Tensor,
    initial_state: Tensor | None = None,
    *,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The state before each step, in the dtype of the computation."""
    dim %= states.dim()
    bounds = _bounds(cu_seqlens, states.shape[dim])
    before = torch.empty_like(states, dtype=compute_dtype(states.dtype))
    initial = _states_of(initial_state, states, dim, len(bounds), cu_seqlens is not None)
    for (begin, end), state in zip(bounds, initial.unbind(dim), strict=True):
        if begin < end:
            first, rest, earlier = (
                (end - 1, begin, begin + 1) if reverse else (begin, begin + 1, begin)
            )
            count = end - begin - 1
            before.narrow(dim, rest, count).copy_(states.narrow(dim, earlier, count))
            before.select(dim, first).copy_(state)
    return before


def backward(
    gates: Tensor,
    states: Tensor,
    states_grad: Tensor,
    initial_state: Tensor | None = None,
    final_state_grad: Tensor | None = None,
    *,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``gates``, ``tokens`` and the initial state, given the forward's states.

    By torch's convention for complex numbers, factors enter conjugated. Returns (gates_grad in the
    shape and dtype of ``gates``, summed where they are broadcast; tokens_grad like ``states``;
    initial_state_grad in the state's shape and the dtype of the computation).
    """
    dim %= states.dim()
    compute = compute_dtype(states.dtype)
    bounds = _bounds(cu_seqlens, states.shape[dim])
    packed = cu_seqlens is not None
    ends = _states_of(final_state_grad, states, dim, len(bounds), packed)
    adjoint = torch.empty_like(states, dtype=compute)
    factor = gates.to(compute).conj().resolve_conj().broadcast_to(states.shape).unbind(dim)
    grad, out = states_grad.to(compute).unbind(dim), adjoint.unbind(dim)
    for (begin, end), h_end in zip(bounds, ends.unbind(dim), strict=True):
        order = _steps(begin, end, not reverse)
        for place, t in enumerate(order):
            if place == 0:
                torch.add(grad[t], h_end, out=out[t])
            else:
                later = order[place - 1]
                torch.addcmul(grad[t], factor[later], out[later], out=out[t])
        if begin < end:
            h_end.copy_(factor[order[-1]] * out[order[-1]])
    earlier = preceding(states, initial_state, dim=dim, reverse=reverse, cu_seqlens=cu_seqlens)
    gates_grad = (adjoint * earlier.conj()).sum_to_size(gates.shape)
    if gates_grad.is_complex() and not gates.is_complex():
        gates_grad = gates_grad.real
    tokens_grad = adjoint.to(states.dtype)
    return gates_grad.to(gates.dtype), tokens_grad, ends if packed else ends.squeeze(dim)
