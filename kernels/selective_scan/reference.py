"""selective_scan in plain torch: what the kernels are tested and attested against, and run when none fits.

    δ = delta + delta_bias, or softplus of that, which is the identity above 20
    h[t] = exp(δ[t]·A)·h[t-1] + δ[t]·B[t]·u[t]
    y[t] = Σ_n C[t, n]·h[t, n] + D·u[t], of complex numbers twice the real part of the sum
    out  = y·silu(z)

One step after the other in float32, or in float64 where ``u`` is that, in operators that torch differentiates.
``u``, ``delta`` and ``z`` are (B, D, L); ``A`` is (D, N); ``B`` and ``C`` are (D, N), (B, N, L) or (B, G, N, L),
whose group g has the D / G channels from g·D / G on. States are (B, D, N), or (B, S, D, N) of S sequences that are
packed along time.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What real numbers are computed in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def state_dtype(u: torch.dtype, A: torch.dtype) -> torch.dtype:
    """The dtype of states: complex where ``A`` is."""
    compute = compute_dtype(u)
    if not A.is_complex:
        return compute
    return torch.complex128 if compute == torch.float64 else torch.complex64


def _bounds(cu_seqlens: Tensor | None, time: int) -> list[tuple[int, int]]:
    if cu_seqlens is None:
        return [(0, time)]
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != time or ends != sorted(ends):
        raise ValueError(f"cu_seqlens is {ends}; it must rise from 0 to the {time} steps of u")
    return list(pairwise(ends))


def step_sizes(delta: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """δ in the computation's dtype, (B, D, L)."""
    sizes = delta.to(compute_dtype(delta.dtype))
    if bias is not None:
        sizes = sizes + bias.to(sizes.dtype).unsqueeze(-1)
    return functional.softplus(sizes, threshold=20.0) if softplus else sizes


def from_pairs(x: Tensor) -> Tensor:
    """Complex numbers of the pairs along the last dimension. ``view_as_complex`` refuses pairs that begin at an odd
    offset in memory."""
    return torch.complex(x[..., ::2], x[..., 1::2])


def per_channel(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """``B`` or ``C`` as (B, D, N, L), with 1 for B and L where they do not matter. ``dtype`` is that of states: of
    complex numbers, what changes with time comes as pairs along it."""
    if x.dim() == 2:
        return x.to(dtype)[None, :, :, None]
    if x.dim() == 3:
        x = x.unsqueeze(1)
    if dtype.is_complex and not x.is_complex():
        x = from_pairs(x.to(dtype.to_real()))
    return x.to(dtype).repeat_interleave(channels // max(1, x.shape[1]), 1)


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output in the dtype of ``u``, and the final state."""
    batch, channels, time = u.shape
    compute, of_states = compute_dtype(u.dtype), state_dtype(u.dtype, A.dtype)
    sizes = step_sizes(delta.to(compute), delta_bias, delta_softplus)
    wide = u.to(compute)
    decay = A.to(of_states)
    inward, outward = (per_channel(x, channels, of_states) for x in (B, C))
    scaled = (sizes * wide).to(of_states)
    outputs, finals = [], []
    for number, (begin, end) in enumerate(_bounds(cu_seqlens, time)):
        if initial_state is None:
            state = wide.new_zeros((batch, channels, A.shape[1]), dtype=of_states)
        else:
            entering = initial_state if cu_seqlens is None else initial_state[:, number]
            state = entering.to(of_states)
        for t in range(begin, end):
            gate = torch.exp(sizes[:, :, t, None] * decay)
            state = gate * state + scaled[:, :, t, None] * _at(inward, t)
            product = (state * _at(outward, t)).sum(-1)
            outputs.append(2 * product.real if of_states.is_complex else product)
        finals.append(state)
    y = torch.stack(outputs, -1) if outputs else torch.zeros_like(wide)
    if D is not None:
        y = y + D.to(compute).unsqueeze(-1) * wide
    if z is not None:
        y = y * functional.silu(z.to(compute))
    last = finals[0] if cu_seqlens is None else torch.stack(finals, 1)
    return y.to(u.dtype), last


def _at(x: Tensor, t: int) -> Tensor:
    return x[..., min(t, x.shape[-1] - 1)]


def checkpoints(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    interval: int,
) -> Tensor:
    """The states before every ``interval`` steps of each sequence, (B, L // interval + S, D, N), as the forward kernel
    leaves them. ``B`` and ``C`` change with time."""
    time, bounds = u.shape[2], _bounds(cu_seqlens, u.shape[2])
    of_state = (u.shape[0], *A.shape)
    kept = u.new_zeros((u.shape[0], time // interval + len(bounds), *A.shape), dtype=torch.float32)
    for number, (begin, end) in enumerate(bounds):
        if initial_state is None:
            state = A.new_zeros(of_state)
        else:
            state = initial_state if cu_seqlens is None else initial_state[:, number]
        for place, step in enumerate(range(begin, end, interval)):
            kept[:, begin // interval + number + place] = state
            part = slice(step, min(end, step + interval))
            _, state = forward(
                u[..., part], delta[..., part], A, B[..., part], C[..., part],
                delta_bias=delta_bias, delta_softplus=delta_softplus, initial_state=state,
            )  # fmt: skip
    return kept
