"""The gradients of a selective scan, by autograd of the family's reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from scan_registry.kernels.selective_scan import reference
from scan_registry.ops.recomputation import gradients


def of_reference(
    tensors: Sequence[Tensor | None], softplus: bool, cu_seqlens: Tensor | None,
    out_grad: Tensor | None, final_grad: Tensor | None, wanted: Sequence[bool] = (True,) * 9,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Those that are wanted, of ``u, delta, A, B, C, D, z, delta_bias, initial_state``, which ``tensors`` are in this order."""
    return gradients(
        tensors,
        wanted,
        lambda leaves, _: zip(
            reference.forward(*leaves[:8], softplus, leaves[8], cu_seqlens),
            (out_grad, final_grad),
            strict=True,
        ),
    )
