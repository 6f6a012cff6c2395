"""Stands in for ``causal_conv1d``: short causal convolutions of each channel along time.

What the functions do differently from those that they replace: widths from 2 to 8; tensors of any strides and any number
of channels; ``seq_idx`` and states in both layouts, and together; a deterministic backward pass; CPU tensors, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.compat.arguments import as_flag, check_initial_states
from scan_registry.kernels.causal_conv1d.op.function import causal_conv1d
from scan_registry.kernels.causal_conv1d.op.function import causal_conv1d_update as _update
from scan_registry.ops.checks import as_index, check_dense
from scan_registry.ops.values import check_bounds

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False,
    final_states_out: Tensor | None = None, activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """y[t] = act(bias + Σ weight[width-1-j] · x[t-j]), for each channel by itself.

    As ``causal_conv1d.causal_conv1d_fn``, except that steps of ``seq_idx`` see no further back than to where the number
    changes, the initial states precede the first of its sequences, and final states are those of its last one.

    Args:
        x: (batch, channels, time).
        weight: (channels, width).
        bias: (channels,).
        seq_idx: (batch, time) integers; below zero for padding, for which y is zero.
        initial_states: (batch, channels, width-1).
        return_final_states: return the last width-1 inputs, too.
        final_states_out: (batch, channels, width-1), to write them to; not used unless they are returned.
        activation: None, ``"silu"`` or ``"swish"``.

    Returns:
        y in the shape of x, and the final states if they are asked for.

    Raises:
        TypeError, ValueError: the arguments are not as described.
    """
    if initial_states is not None:
        tensors = isinstance(x, Tensor) and isinstance(weight, Tensor)
        known = tensors and (x.dim(), weight.dim()) == (3, 2)
        shape = (*x.shape[:2], weight.shape[1] - 1) if known else None
        check_initial_states(initial_states, x, shape, "(batch, channels, width - 1)")
    options: dict[str, Any] = {
        "initial_state": initial_states,
        "seq_idx": seq_idx,
        "activation": activation,
    }
    if not as_flag("return_final_states", return_final_states):
        y: Tensor = causal_conv1d(x, weight, bias, **options)
        return y
    if final_states_out is not None:
        _check_out(final_states_out, x)
    y, final_state = causal_conv1d(x, weight, bias, return_final_state=True, **options)
    if final_states_out is None:
        return y, final_state
    if final_states_out.shape != final_state.shape:
        raise ValueError(
            f"final_states_out has shape {tuple(final_states_out.shape)}; it must be "
            f"(batch, channels, width - 1), here {tuple(final_state.shape)}"
        )
    return y, final_states_out.copy_(final_state)


def _check_out(out: Any, x: Any) -> None:
    """Refuse memory for final states that is of another dtype or device than ``x``, which the states are of."""
    check_dense("final_states_out", out)
    if not isinstance(x, Tensor):
        return  # for the operator to refuse
    if out.dtype != x.dtype:
        raise TypeError(f"final_states_out has dtype {out.dtype}, x {x.dtype}; both must be of one")
    if out.device != x.device:
        raise ValueError(
            f"final_states_out is on {out.device}, x on {x.device}; they must be on one device"
        )


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One step, or a few, of sequences whose last inputs are in ``conv_state``, which is changed in place.

    As ``causal_conv1d.causal_conv1d_update``. Where ``conv_state_indices`` are below zero, y is zero and no state changes.

    Args:
        x: (batch, channels) or (batch, channels, steps).
        conv_state: (batch, channels, inputs), with at least width-1 inputs.
        weight: (channels, width).
        bias: (channels,).
        activation: None, ``"silu"`` or ``"swish"``.
        cache_seqlens: (batch,) int32, how many inputs came before; the state is a ring then.
        conv_state_indices: (batch,) int32, which row of the state belongs to each batch.
            ``scan_registry.causal_conv1d_update`` says which values of both are refused.

    Returns:
        y in the shape of x.

    Raises:
        TypeError, ValueError: the arguments are not as described.
    """
    # The original records no derivative, whatever its weights require.
    with torch.no_grad():
        return _update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last ``state_len`` inputs of sequences that are packed along time, zeros before those of shorter ones.

    As ``causal_conv1d.causal_conv1d_varlen_states``, in plain torch and without waiting for a GPU.

    Args:
        x: (total time, channels).
        cu_seqlens: (sequences + 1,), where each begins and the last one ends. Values that do not rise, or are not from 0
            to the total time, are refused on the CPU, and under ``SCAN_REGISTRY_DEBUG=1`` on a GPU.
        state_len: how many inputs.

    Returns:
        (sequences, channels, state_len), whose channels have stride 1.

    Raises:
        TypeError, ValueError: the arguments are not as described.
    """
    check_dense("x", x)
    check_dense("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}; accepted are int32 and int64")
    if x.device != cu_seqlens.device:
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device}, x on {x.device}; they must be on one device"
        )
    state_len = as_index("state_len", state_len)
    if state_len < 0:
        raise ValueError(f"state_len is {state_len}; it must be 0 or more")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (total time, channels)")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (sequences + 1,)"
        )
    check_bounds(cu_seqlens, x.shape[0], whole=False, anywhere=True)
    begins, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    steps = ends.unsqueeze(1) + torch.arange(-state_len, 0, device=x.device)
    inside = (steps >= begins.unsqueeze(1)).unsqueeze(-1)
    if x.shape[0] == 0:
        return x.new_zeros(len(ends), state_len, x.shape[1]).transpose(1, 2)
    gathered = x[steps.clamp(0, x.shape[0] - 1)]
    return torch.where(inside, gathered, torch.zeros_like(gathered)).transpose(1, 2)
