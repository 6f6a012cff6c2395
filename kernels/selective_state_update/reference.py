"""selective_state_update in plain torch: what the kernel is tested and attested against, and runs when none fits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def compute_dtype(state: torch.dtype) -> torch.dtype:
    """What a step is computed in."""
    return torch.float64 if state == torch.float64 else torch.float32


def step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """One step in place of ``state``; the output, in the dtype of ``x``.

    δ      = dt + dt_bias, or softplus of that, which is the identity above 20
    state' = exp(δ·A)·state + δ·B·x
    y      = Σ_n C[n]·state'[n] + D·x
    out    = y, or y·silu(z)

    In float32, or in float64 where the state is that. Without heads the state is (slots, channels, N), with heads
    (slots, heads, channels, N); ``x``, ``dt`` and ``z`` are the same with the batch in place of slots, and without N;
    ``A``, ``D`` and ``dt_bias`` have no batch either. ``B`` and ``C`` are (batch, N) or (batch, groups, N): each group
    belongs to as many neighbouring heads, or without heads channels, as every other. Row ``indices[b]`` of the state is that of batch b, else row b; where there is
    no such row, the output is zero.
    """
    compute = compute_dtype(state.dtype)
    wide = x.to(compute)
    sizes = dt.to(compute)
    if dt_bias is not None:
        sizes = sizes + dt_bias.to(compute)
    if dt_softplus:
        sizes = functional.softplus(sizes, threshold=20.0)
    inward, outward = (_per_head(projection.to(compute), state) for projection in (B, C))
    rows = there = None
    previous = state
    if indices is not None:
        slots = state.shape[0]
        there = (indices >= 0) & (indices < slots)
        rows = indices.long().clamp(0, max(slots - 1, 0))
        previous = state[rows] if slots else state.new_zeros((x.shape[0], *state.shape[1:]))
    gates = torch.exp(sizes.unsqueeze(-1) * A.to(compute))
    new = gates * previous.to(compute) + (sizes * wide).unsqueeze(-1) * inward
    y = (new * outward).sum(-1)
    if D is not None:
        y = y + D.to(compute) * wide
    if z is not None:
        y = y * functional.silu(z.to(compute))
    if rows is None or there is None:
        state.copy_(new)
        return y.to(x.dtype)
    state.index_copy_(0, rows[there], new[there].to(state.dtype))
    present = there.view(-1, *(1,) * (y.dim() - 1))
    return torch.where(present, y, torch.zeros_like(y)).to(x.dtype)


def _per_head(projection: Tensor, state: Tensor) -> Tensor:
    """``B`` or ``C`` with the dimensions of the state."""
    if projection.dim() == 2:
        projection = projection.unsqueeze(1)
    spread = projection.repeat_interleave(state.shape[1] // max(1, projection.shape[1]), 1)
    return spread.unsqueeze(2) if state.dim() == 4 else spread
