"""What a Mamba block computes between its outer projections: a convolution, projections to step sizes and to B and C,
and a selective scan. Each layout goes through as it is given, without a transposed copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from scan_registry.kernels.causal_conv1d.op.function import causal_conv1d, causal_conv1d_update
from scan_registry.kernels.selective_scan.op.function import selective_scan

#: A matrix, or a function that maps the last dimension.
Map = Tensor | Callable[[Tensor], Tensor]


class Weights(NamedTuple):
    """The parameters, or modules that hold them; of D channels, R ranks of the step sizes, and N states."""

    #: (D, width) and (D,); or a convolution with its bias, whose output n belongs to input n.
    conv: Map
    conv_bias: Tensor | None
    #: R.
    rank: int
    #: (R + 2·N, D), of complex states (R + 4·N, D): rows are step sizes, B and C.
    x_proj: Map
    #: (D, R) and (D,).
    dt_proj: Map
    dt_bias: Tensor | None
    #: (D, N) and (D,).
    A: Tensor
    D: Tensor | None
    #: What does not come from ``x_proj``, as ``selective_scan`` takes it.
    B: Tensor | None = None
    C: Tensor | None = None
    #: Added to the projections, (N,), of complex states (2·N,).
    B_bias: Tensor | None = None
    C_bias: Tensor | None = None


class Norms(NamedTuple):
    """Weights of root-mean-square norms, of B and C over states, and of step sizes over channels; None for no norm."""

    B: Tensor | None = None
    C: Tensor | None = None
    dt: Tensor | None = None
    eps: float = 1e-6


NO_NORMS = Norms()


class States(NamedTuple):
    """What a block remembers: the last width-1 inputs of its convolution, and the states of its scan."""

    conv: Tensor
    scan: Tensor


def convolve_and_scan(
    x: Tensor,
    z: Tensor,
    weights: Weights,
    norms: Norms = NO_NORMS,
    *,
    delta_softplus: bool = True,
    before: States | None = None,
    return_state: bool = False,
    backend: Any = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The output (batch, D, L) of ``x``, gated by ``z``, both (batch, D, L), and if asked for the scan's state after it.

    ``before`` are the states before the first step, zeros if None. Where channels of ``x`` lie without gaps, as
    behind a linear layer, so do those of everything that is made of them; else time does.
    """
    earlier = None if before is None else before.conv
    u = convolve(x, weights.conv, weights.conv_bias, earlier, backend=backend)
    taken = (weights.B is None) + (weights.C is None)
    steps, of_B, of_C = _parts(projected(u.transpose(1, 2), weights, taken), weights)
    if isinstance(weights.dt_proj, Tensor) and u.stride(1) != 1:
        delta = torch.matmul(weights.dt_proj, steps.transpose(1, 2))
    else:
        delta = mapped(steps, weights.dt_proj).transpose(1, 2)
    if norms.dt is not None:
        delta = rms_norm(delta, norms.dt, norms.eps)
    B, C = weights.B, weights.C
    if B is None:
        B = _over_time(of_B, weights.B_bias, weights.A)
    if C is None:
        C = _over_time(of_C, weights.C_bias, weights.A)
    if norms.B is not None:
        B = rms_norm(B, norms.B, norms.eps)
    if norms.C is not None:
        C = rms_norm(C, norms.C, norms.eps)
    out: Any = selective_scan(
        *(u, delta, weights.A, B, C, weights.D, z, weights.dt_bias, delta_softplus),
        None if before is None else before.scan,
        return_final_state=return_state,
        backend=backend,
    )
    return out if return_state else (out, None)


def _rows(weights: Weights) -> int:
    """How many outputs of ``x_proj`` are B, or C, of one step."""
    return weights.A.shape[1] * (1 + weights.A.is_complex())


def _parts(projections: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """The step sizes, and what B and C are made of; nothing for one that does not come from ``x_proj``. Of one split the backward
    pass is one launch; of three slices it is eight."""
    rank, rows = weights.rank, _rows(weights)
    of_B = rows if weights.B is None else 0
    steps, B, C = projections.split([rank, of_B, projections.shape[-1] - rank - of_B], -1)
    unused = C.shape[-1] - (rows if weights.C is None else 0)
    return steps, B, C[..., unused:] if unused else C


def projected(u: Tensor, weights: Weights, taken: int) -> Tensor:
    """``x_proj`` of ``u`` (…, D): step sizes, and as ``taken`` says of B and C none, one or both. ``ValueError`` if a module
    returns another number of them; the checks of ``mamba_inner_fn`` are for its weights."""
    features = mapped(u, weights.x_proj)
    wanted = weights.rank + taken * _rows(weights)
    if not isinstance(weights.x_proj, Tensor) and features.shape[-1] != wanted:
        raise ValueError(
            f"x_proj returned {features.shape[-1]} features; like the projection that it replaces it has to return {wanted}"
        )
    return features


def mapped(x: Tensor, by: Map) -> Tensor:
    """``x`` with its last dimension mapped."""
    return linear(x, by) if isinstance(by, Tensor) else by(x).to(x.dtype)


def convolve(
    x: Tensor,
    conv: Map,
    bias: Tensor | None,
    earlier: Tensor | None = None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Any = "auto",
) -> Tensor:
    """The convolution of x (batch, channels, time) behind ``earlier`` inputs, and silu of it, by weights (channels, width)
    or by a function. A function sees one sequence a row, and always has the activation."""
    if isinstance(conv, Tensor):
        return causal_conv1d(
            *(x, conv, bias),
            initial_state=earlier,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            activation=activation,
            backend=backend,
        )
    if seq_idx is not None or cu_seqlens is not None:
        raise ValueError(
            "conv1d is wrapped, hooked or no Conv1d, and runs in torch, which takes neither seq_idx nor cu_seqlens"
        )
    inputs = x if earlier is None else torch.cat([earlier.to(x.dtype), x], -1)
    return convolved(conv, inputs, x.shape[2])


def convolve_step(
    x: Tensor, conv_state: Tensor, conv: Map, bias: Tensor | None, *, backend: Any = "auto"
) -> Tensor:
    """silu of the convolution of one step x (batch, channels), whose state is changed in place."""
    # The state is of one dtype with its input, which autocast may have narrowed.
    taken = x.to(conv_state.dtype)
    if isinstance(conv, Tensor):
        update = causal_conv1d_update(taken, conv_state, conv, bias, "silu", backend=backend)
        return update.to(x.dtype)
    conv_state.copy_(torch.cat([conv_state[..., 1:], taken.unsqueeze(-1)], -1))
    return convolved(conv, conv_state.to(x.dtype), 1).squeeze(-1)


def convolved(conv: Callable[[Tensor], Tensor], inputs: Tensor, steps: int) -> Tensor:
    """silu of what a convolution gives for the last ``steps`` of its inputs (batch, D, time)."""
    outputs, time = conv(inputs), inputs.shape[2]
    if outputs.shape[:2] != inputs.shape[:2] or outputs.shape[2] < time:
        raise ValueError(
            f"conv1d returned {tuple(outputs.shape)} for {tuple(inputs.shape)}; like the convolution that it replaces it "
            "has to return as many channels, and an output for each step before those of its padding"
        )
    return silu(outputs[..., time - steps : time]).to(inputs.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square along the dimension before the last one, times ``weight``; in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-2, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype).unsqueeze(-1)).to(x.dtype)


def _over_time(projected: Tensor, bias: Tensor | None, A: Tensor) -> Tensor:
    """(batch, L, N) as (batch, N, L); of complex states pairs in the last dimension, (batch, N, 2·L)."""
    if bias is not None:
        projected = projected + bias.to(projected.dtype)
    if not A.is_complex():
        return projected.transpose(1, 2)
    pairs: Tensor = projected.unflatten(-1, (-1, 2))
    return pairs.transpose(1, 2).flatten(2)
