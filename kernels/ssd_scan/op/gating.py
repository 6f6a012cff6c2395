"""The derivatives of the gate, out = y·silu(z), of which kernels compute the forward pass alone.

Both are computed in float32, or in float64 if the tensors are that, and rounded once. Operators of torch promote what they read and
round what they write, so that few copies in float32 are made.
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
    product = out_grad.to(reference.compute_dtype(z.dtype)) * ungated
    gradient: Tensor = torch.ops.aten.silu_backward(product, z, grad_input=z.new_empty(z.shape))
    return gradient
