"""The derivatives of the gate, out = y·silu(z), of which kernels compute the forward pass alone.

Both are computed in float32, or in float64 if the tensors are that, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from scan_registry.kernels.ssd_scan import reference


def gradient_of_ungated(out_grad: Tensor, z: Tensor) -> Tensor:
    """The gradient of y, without gaps."""
    wide = reference.compute_dtype(z.dtype)
    return (out_grad.to(wide) * silu(z.to(wide))).to(z.dtype).contiguous()


def gradient_of_z(out_grad: Tensor, ungated: Tensor, z: Tensor) -> Tensor:
    """The gradient of z, without gaps. ``ungated`` is y."""
    wide = reference.compute_dtype(z.dtype)
    gradient = torch.ops.aten.silu_backward(out_grad.to(wide) * ungated, z.to(wide))
    return gradient.to(z.dtype).contiguous()  # type: ignore[no-any-return]
