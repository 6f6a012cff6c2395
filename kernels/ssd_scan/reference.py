"""ssd_scan in plain torch, one step after the other: what the kernels and the chunked form are tested against.

    δ    = clamp(dt + dt_bias, low, high), with softplus before the clamp if asked for, which is the identity above 20
    s[t] = exp(δ[t]·A)·s[t-1] + δ[t]·x[t] ⊗ B[t]
    out  = (s[t]·C[t] + D·x[t])·silu(z[t])

``x`` and ``z`` are (batch, T, H, P); ``dt`` is (batch, T, H); ``A`` and ``dt_bias`` are (H,); ``B`` and ``C`` are (batch, T, G, N),
whose group g has the H / G heads from g·H / G on; ``D`` is (H,) or (H, P). States are (batch, H, P, N), or (batch, sequences, H,
P, N) of sequences that are packed along time. All is computed in float32, or in float64 where ``x`` is that, in operators that torch
differentiates.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the computation and of states."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def step_sizes(
    dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float], dtype: torch.dtype
) -> Tensor:
    """δ in ``dtype``, (batch, T, H)."""
    sizes = dt.to(dtype)
    if bias is not None:
        sizes = sizes + bias.to(dtype)
    if softplus:
        sizes = functional.softplus(sizes, threshold=20.0)
    return sizes.clamp(*limit)


def finished(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """(y + D·x)·silu(z), in the dtype of ``x``."""
    if D is not None:
        y = y + (D if D.dim() == 2 else D.unsqueeze(-1)).to(y.dtype) * x.to(y.dtype)
    if z is not None:
        y = y * functional.silu(z.to(y.dtype))
    return y.to(x.dtype)


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output in the dtype of ``x``, and the final state."""
    batch, time, heads, size = x.shape
    dtype = compute_dtype(x.dtype)
    sizes = step_sizes(dt, dt_bias, dt_softplus, dt_limit, dtype)
    gates = torch.exp(sizes * A.to(dtype))
    scaled = sizes.unsqueeze(-1) * x.to(dtype)
    inward, outward = (
        t.to(dtype).repeat_interleave(heads // max(1, t.shape[2]), 2) for t in (B, C)
    )
    bounds = [0, time] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals = [], []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        state = scaled.new_zeros(batch, heads, size, B.shape[3])
        if initial_state is not None:
            entering = initial_state if cu_seqlens is None else initial_state[:, number]
            state = entering.to(dtype)
        for t in range(begin, end):
            if seq_idx is not None and t > begin:
                restarts = (seq_idx[:, t] != seq_idx[:, t - 1])[:, None, None, None]
                state = torch.where(restarts, 0, state)
            token = scaled[:, t].unsqueeze(-1) * inward[:, t].unsqueeze(-2)
            state = gates[:, t, :, None, None] * state + token
            outputs.append((state * outward[:, t].unsqueeze(-2)).sum(-1))
        finals.append(state)
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(scaled)
    final = finals[0] if cu_seqlens is None else torch.stack(finals, 1)
    return finished(y, x, D, z), final
