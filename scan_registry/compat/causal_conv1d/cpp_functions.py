"""Stands in for ``causal_conv1d.cpp_functions``: the convolution and its derivative as two functions, neither of which is recorded.

mamba_ssm's own Triton kernels call them in its blocks, so that they run where mamba_ssm is installed and causal-conv1d is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scan_registry.compat.arguments import as_flag
from scan_registry.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from scan_registry.kernels.causal_conv1d.op import plans
from scan_registry.kernels.causal_conv1d.op.arguments import normalised

__all__ = [
    "causal_conv1d_bwd_function",
    "causal_conv1d_fwd_function",
    "causal_conv1d_update_function",
]


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """``causal_conv1d_fn`` without derivatives.

    Args:
        x: (batch, channels, time).
        weight: (channels, width).
        bias: (channels,).
        seq_idx: (batch, time) integers.
        initial_states: (batch, channels, width-1).
        final_states_out: (batch, channels, width-1), to write the last inputs to.
        silu_activation: whether the output's activation is SiLU; else there is none.

    Returns:
        y in the shape of x.

    Raises:
        TypeError, ValueError: the arguments are not as described.
    """
    final, activation = final_states_out is not None, _activation(silu_activation)
    with torch.no_grad():
        result = causal_conv1d_fn(
            *(x, weight, bias, seq_idx, initial_states, final, final_states_out, activation)
        )
    return result[0] if isinstance(result, tuple) else result


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of ``causal_conv1d_fwd_function``.

    Args:
        x: as of the forward function, like the others of the same names.
        weight: see ``x``.
        bias: see ``x``.
        dout: the gradient of y.
        seq_idx: see ``x``.
        initial_states: see ``x``.
        dfinal_states: the gradient of the last inputs, (batch, channels, width-1); None if it is zero.
        dx: where to write the gradient of x; None for new memory.
        return_dinitial_states: whether to compute the gradient of the initial states.
        silu_activation: see ``x``.

    Returns:
        The gradients of x, weight, bias and the initial states; None where there is no bias, or no such gradient is asked for.

    Raises:
        TypeError, ValueError: the arguments are not as described.
    """
    final, activation = dfinal_states is not None, _activation(silu_activation)
    wanted = True, True, bias is not None, as_flag("return_dinitial_states", return_dinitial_states)
    if dx is not None and dx.shape != x.shape:
        raise ValueError(f"dx has shape {tuple(dx.shape)}; it must be that of x, {tuple(x.shape)}")
    if dfinal_states is not None:
        dfinal_states = dfinal_states.to(x.dtype)
    with torch.no_grad():
        arguments, options = normalised(
            *(x, weight, bias, initial_states, seq_idx, None, final, activation, "auto")
        )
        of_x, of_weight, of_bias, of_states = plans.backward(
            *(arguments, dout.to(x.dtype), dfinal_states, options, wanted)
        )
        assert of_x is not None
        assert of_weight is not None
        if dx is not None:
            of_x = dx.copy_(of_x)
    if bias is not None and of_bias is not None:
        of_bias = of_bias.to(bias.dtype)
    return of_x, of_weight.to(weight.dtype), of_bias, of_states


def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """``causal_conv1d_update``, with the activation as a bool.

    Args:
        x: (batch, channels, steps).
        conv_state: (batch, channels, inputs), with at least width-1 inputs; it is changed in place.
        weight: (channels, width).
        bias: (channels,).
        silu_activation: whether the output's activation is SiLU; else there is none.
        cache_seqlens: (batch,) int32, how many inputs came before; the state is a ring then.
        conv_state_indices: (batch,) int32, which row of the state belongs to each batch.

    Returns:
        y in the shape of x.

    Raises:
        TypeError, ValueError: the arguments are not as described.
    """
    activation = _activation(silu_activation)
    return causal_conv1d_update(
        x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
    )


def _activation(silu: bool) -> str | None:
    return "silu" if as_flag("silu_activation", silu) else None
