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
    gate = silu(z.to(reference.compute_dtype(z.dtype)))
    return torch.mul(out_grad, gate, out=z.new_empty(z.shape))


def gradient_of_z(out_grad: Tensor, ungated: Tensor, z: Tensor) -> Tensor:
    """The gradient of z, without gaps. ``ungated`` is y."""
    dtype = reference.compute_dtype(z.dtype)
    gradient: Tensor = torch.ops.aten.silu_backward(out_grad.to(dtype) * ungated, z.to(dtype))
    return z.new_empty(z.shape).copy_(gradient)
