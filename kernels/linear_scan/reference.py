"""linear_scan in plain torch: what the kernels are tested and attested against, and run when none fits.

The recurrence x[t] = gates[t] * x[t-1] + tokens[t] and its reverse-mode derivative, one step after
the other in the dtype asked for. Sequential on purpose: no rounding but the recurrence's own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything narrower is computed in float32, as in the kernels."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None = None,
    *,
    dim: int = -1,
) -> Tensor:
    """States x of the recurrence along ``dim``.

    gates, tokens: same shape and dtype. initial_state: that shape without ``dim``; zero if None.
    Returns states of the inputs' shape and dtype, computed in float32 or, for float64, in float64.
    """
    compute = _accumulator(tokens.dtype)
    states = torch.empty_like(tokens)
    by_time = zip(gates.unbind(dim), tokens.unbind(dim), states.unbind(dim), strict=True)
    first = tokens.select(dim, 0) if initial_state is None else initial_state
    x = torch.zeros_like(first, dtype=compute) if initial_state is None else first.to(compute)
    for gate, token, out in by_time:
        x = gate.to(compute) * x + token.to(compute)
        out.copy_(x)
    return states


def backward(
    gates: Tensor,
    states: Tensor,
    states_grad: Tensor,
    initial_state: Tensor | None = None,
    final_state_grad: Tensor | None = None,
    *,
    dim: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``gates``, ``tokens`` and the initial state, given the forward's states.

    gates, states, states_grad: same shape and dtype. initial_state, final_state_grad: that shape
    without ``dim``; zero if None. Returns (gates_grad, tokens_grad, initial_state_grad).
    """
    compute = _accumulator(states.dtype)
    gates_grad, tokens_grad = torch.empty_like(states), torch.empty_like(states)
    one_step = states.select(dim, 0)
    before = torch.zeros_like(one_step) if initial_state is None else initial_state
    h = torch.zeros_like(one_step, dtype=compute)
    if final_state_grad is not None:
        h = final_state_grad.to(compute)
    gate, state, grad = gates.unbind(dim), states.unbind(dim), states_grad.unbind(dim)
    for_gates, for_tokens = gates_grad.unbind(dim), tokens_grad.unbind(dim)
    for t in reversed(range(len(gate))):
        adjoint = grad[t].to(compute) + h
        earlier = (state[t - 1] if t > 0 else before).to(compute)
        for_tokens[t].copy_(adjoint)
        for_gates[t].copy_(adjoint * earlier)
        h = gate[t].to(compute) * adjoint
    return gates_grad, tokens_grad, h.to(states.dtype)
