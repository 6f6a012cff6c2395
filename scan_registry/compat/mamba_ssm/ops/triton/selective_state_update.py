"""Stands in for ``mamba_ssm.ops.triton.selective_state_update``."""

from __future__ import annotations

import torch
from torch import Tensor

from scan_registry.compat.arguments import as_flag
from scan_registry.kernels.selective_state_update.op.function import (
    selective_state_update as _update,
)

__all__ = ["selective_state_update"]


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One step of a selective scan, or of Mamba-2's, which changes ``state`` in place.

    As ``mamba_ssm.ops.triton.selective_state_update.selective_state_update``, except that

    - ``D`` and ``dt_bias`` may be None in any combination, and strides are any;
    - where ``state_batch_indices`` are below zero, the output is zero, and no state changes;
    - on the CPU, too.

    Like the original it has no derivative, and records none: the output does not require a gradient.

    Args:
        state: (batch, channels, N), or (batch, heads, channels, N).
        x: (batch, channels), or (batch, heads, channels).
        dt: like ``x``.
        A: (channels, N), or (heads, channels, N). Mamba-2's are expanded to these shapes, which copies nothing.
        B: (batch, N), or (batch, groups, N).
        C: like ``B``.
        D: (channels,), or (heads, channels).
        z: like ``x``; the output is multiplied by its SiLU.
        dt_bias: like ``D``.
        dt_softplus: whether step sizes are the softplus of ``dt + dt_bias``.
        state_batch_indices: (batch,) int32, which row of ``state`` belongs to each batch.
            ``scan_registry.selective_state_update`` says which values are refused.

    Returns:
        The output, in the shape and the dtype of ``x``.

    Raises:
        TypeError, ValueError: the arguments are not as described.
        NoKernelError: ``require`` or ``SCAN_REGISTRY_REQUIRE`` allows nothing that runs on this GPU.
    """
    softplus = as_flag("dt_softplus", dt_softplus)
    with torch.no_grad():
        return _update(state, x, dt, A, B, C, D, z, dt_bias, softplus, state_batch_indices)
