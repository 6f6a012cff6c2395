"""The stand-ins for mamba_ssm's norms with a gate, and what plain torch gives, group by group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, silu

from scan_registry.compat.mamba_ssm.ops.triton import layernorm_gated
from scan_registry.compat.mamba_ssm.ops.triton.layernorm_gated import layernorm_fn, rmsnorm_fn


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("size", [None, 3])
def test_norms(size: int | None, gated: bool, first: bool) -> None:
    x, z = torch.randn(2, 5, 6).double(), torch.randn(2, 5, 6).double()
    weight, bias = torch.randn(6).double(), torch.randn(6).double()
    gate = z if gated else None
    inputs = x * silu(z) if gated and not first else x
    parts = inputs.split(size or 6, -1)
    after = silu(z) if gated and first else torch.ones_like(x)
    root = [p / (p.square().mean(-1, keepdim=True) + 1e-2).sqrt() for p in parts]
    centered = torch.cat([layer_norm(p, p.shape[-1:], eps=1e-2) for p in parts], -1)
    options: Any = {"z": gate, "eps": 1e-2, "group_size": size, "norm_before_gate": first}
    rms = (torch.cat(root, -1) * weight + bias) * after
    torch.testing.assert_close(rmsnorm_fn(x, weight, bias, **options), rms)
    torch.testing.assert_close(layernorm_fn(x, weight, bias, **options, is_rms_norm=True), rms)
    expected = (centered * weight + bias) * after
    torch.testing.assert_close(layernorm_fn(x, weight, bias, **options), expected)
    module = layernorm_gated.LayerNorm(6, 1e-2, size, first, dtype=torch.float64)
    assert {name: float(v.sum()) for name, v in module.state_dict().items()} == {
        "weight": 6.0,
        "bias": 0.0,
    }
    module.load_state_dict({"weight": weight, "bias": bias})
    torch.testing.assert_close(module(x, gate), expected)
    module.reset_parameters()
    torch.testing.assert_close(module(x, gate), centered * after)


def test_norms_of_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"weight must be a torch.Tensor, not NoneType"):
        rmsnorm_fn(torch.zeros(2, 4), None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group_size is 3; it must divide the 4 features of x"):
        rmsnorm_fn(torch.zeros(2, 4), torch.ones(4), None, group_size=3)
