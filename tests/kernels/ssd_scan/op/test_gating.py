"""The derivatives of ssd_scan's gate."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from scan_registry.kernels.ssd_scan.op.gating import gradient_of_ungated, gradient_of_z


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_they_are_rounded_once(dtype: torch.dtype, device: str) -> None:
    y, z, grad = torch.randn(3, 2, 40, 3, 8, dtype=dtype, device=device)
    y *= 1000  # times grad it would exceed float16
    grad *= 100
    z = torch.cat([z, z], -1)[..., :8]
    before = [t.clone() for t in (y, z, grad)]
    leaves = [t.double().clone().requires_grad_() for t in (y, z)]
    exact = torch.autograd.grad(leaves[0] * silu(leaves[1]), leaves, grad.double())
    ours = gradient_of_ungated(grad, z), gradient_of_z(grad, y, z)
    for gradient, value in zip(ours, exact, strict=True):
        assert gradient.is_contiguous()
        assert gradient.dtype == dtype
        fits = value.abs() < torch.finfo(dtype).max
        error = ((gradient - value).abs() / value.abs())[fits].max()
        assert error < {torch.float32: 1e-5, torch.float64: 1e-13}.get(dtype, torch.finfo(dtype).eps)  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(before, (y, z, grad), strict=True))
