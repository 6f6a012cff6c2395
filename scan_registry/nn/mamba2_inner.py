"""What a Mamba-2 block computes between its outer projections: a convolution, the state space dual scan, a gate, and a norm
around the gate; a part of the features may take a gated linear path beside them. Nothing is copied on the way in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from scan_registry.kernels.selective_state_update.op.function import selective_state_update
from scan_registry.kernels.ssd_scan.op.function import ssd_scan
from scan_registry.nn.gated_norm import RMSNormGated
from scan_registry.nn.mamba_inner import Map, States, convolve, convolve_step
from scan_registry.nn.mamba_states import wide
from scan_registry.nn.submodules import is_plain

#: Of the scan's output and the gate, both (…, heads · head_size); of that alone if ``follows_gate``.
Norm = Callable[[Tensor, Tensor | None], Tensor]


class Sizes(NamedTuple):
    """Of a block, and so of what its first projection returns: in this order the gate and the input of the gated linear path,
    the scan's gate, the convolution's channels, and step sizes."""

    heads: int
    head_size: int
    groups: int
    states: int
    #: Features of the gated linear path.
    linear: int = 0

    @property
    def features(self) -> int:
        """Of the scan's output."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Of the convolution: the scan's input, B and C."""
        return self.features + 2 * self.groups * self.states

    @property
    def projected(self) -> int:
        """All that the first projection returns."""
        return 2 * self.linear + self.features + self.channels + self.heads

    def split(self, projected: Tensor) -> tuple[Any, Any, Tensor, Tensor, Tensor]:
        """The five parts of the first projection's output, views of it; None for the first two without a gated linear path."""
        sizes = self.features, self.channels, self.heads
        if not self.linear:
            return None, None, *projected.split(sizes, -1)
        return tuple(projected.split((self.linear, self.linear, *sizes), -1))

    def inputs(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scan's input (…, heads, head_size) and B and C (…, groups, states), views of the convolution's output."""
        rows = self.groups * self.states
        x, B, C = u.split((self.features, rows, rows), -1)
        shape = self.groups, self.states
        x = x.unflatten(-1, (self.heads, self.head_size))
        return x, B.unflatten(-1, shape), C.unflatten(-1, shape)


class Weights(NamedTuple):
    """The parameters, or a module that holds those of the convolution."""

    #: (channels, width) and (channels,); or a convolution with its bias, whose output n belongs to input n.
    conv: Map
    conv_bias: Tensor | None
    #: (heads,).
    A: Tensor
    #: (heads,) or (heads, head_size).
    D: Tensor | None
    #: (heads,).
    dt_bias: Tensor | None
    #: The least and the greatest step size.
    dt_limit: tuple[float, float] = (0.0, math.inf)


def convolve_and_scan(
    projected: Tensor,
    weights: Weights,
    sizes: Sizes,
    norm: Norm | None,
    *,
    earlier: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = False,
    backend: Any = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The output (batch, time, linear + features) of ``projected``, and if asked for the scan's state after it.

    ``earlier`` are the convolution's last inputs before the first step, and ``initial_state`` is the scan's state, zeros if
    None. With ``cu_seqlens``, sequences packed along the time of one row, they are those before each sequence, and the state
    that is returned is that after each. Without ``norm``, the output is multiplied by silu of the gate.
    """
    gate, inputs, z, xBC, dt = sizes.split(projected)
    u = convolve(
        *(xBC.transpose(1, 2), weights.conv, weights.conv_bias),
        earlier,
        activation=activation,
        # Where there are both, they say the same.
        seq_idx=seq_idx if cu_seqlens is None else None,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    x, B, C = sizes.inputs(u.transpose(1, 2))
    # For gradients of the gate, the scan would keep what it multiplies, too.
    gated = norm is None or (not torch.is_grad_enabled() and follows_gate(norm))
    if initial_state is not None and cu_seqlens is not None:
        initial_state = initial_state.unsqueeze(0)
    result: Any = ssd_scan(
        *(x, dt, weights.A, B, C, weights.D),
        z.unflatten(-1, (sizes.heads, sizes.head_size)) if gated else None,
        *(weights.dt_bias, True, weights.dt_limit, initial_state),
        seq_idx=seq_idx if cu_seqlens is None else None,
        cu_seqlens=cu_seqlens,
        return_final_state=return_state,
        backend=backend,
    )
    out, after = result if return_state else (result, None)
    if after is not None and cu_seqlens is not None:
        after = after.squeeze(0)
    return _joined(gate, inputs, out.flatten(-2), None if gated else z, norm), after


def step(
    projected: Tensor,
    weights: Weights,
    sizes: Sizes,
    norm: Norm | None,
    states: States,
    *,
    backend: Any = "auto",
) -> Tensor:
    """The output (batch, linear + features) of one step ``projected`` (batch, …); ``states`` are changed in place."""
    gate, inputs, z, xBC, dt = sizes.split(projected)
    conv = weights.conv, weights.conv_bias
    x, B, C = sizes.inputs(convolve_step(xBC, states.conv, *conv, backend=backend))
    shape = sizes.heads, sizes.head_size
    bias, smooth = weights.dt_bias, True
    if weights.dt_limit != (0.0, math.inf):  # which the kernel does not have
        dt = wide(dt) if bias is None else wide(dt) + bias
        dt, bias, smooth = softplus(dt).clamp(*weights.dt_limit), None, False
    A = weights.A[:, None, None].expand(*shape, sizes.states)
    gated = norm is None or follows_gate(norm)
    y = selective_state_update(
        *(
            states.scan,
            x,
            dt.unsqueeze(-1).expand(x.shape),
            A,
            B,
            C,
            _per_feature(weights.D, shape),
        ),
        z.unflatten(-1, shape) if gated else None,
        *(_per_feature(bias, shape), smooth),
        backend=backend,
    )
    return _joined(gate, inputs, y.flatten(-2), None if gated else z, norm)


def follows_gate(norm: Norm) -> bool:
    """Whether the norm is of a product with silu of the gate, which kernels compute; and no hook of the norm sees the gate."""
    return (
        isinstance(norm, RMSNormGated)
        and not norm.norm_before_gate
        and is_plain(norm, RMSNormGated.forward)
    )


def _per_feature(x: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """(heads,) or (heads, head_size) as the latter."""
    return x if x is None or x.dim() == 2 else x.unsqueeze(-1).expand(shape)


def _joined(
    gate: Tensor | None, inputs: Any, y: Tensor, z: Tensor | None, norm: Norm | None
) -> Tensor:
    if norm is not None:
        y = norm(y, z)
    return y if gate is None else torch.cat([silu(gate) * inputs, y], -1)
