"""What ``nn.Mamba2`` computes, in a loop over time, and small modules to compare with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear, silu, softplus

from scan_registry import nn

LENGTH, WIDTH = 12, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "bias": {"bias": True, "conv_bias": False, "d_conv": 2},
    "groups": {"ngroups": 2, "norm_before_gate": True},
    "no norm": {"rmsnorm": False, "ngroups": 4},
    "D of channels": {"D_has_hdim": True, "expand": 3},
    "linear path": {"d_ssm": 8, "rmsnorm": False},
    "linear path and norm": {"d_ssm": 8, "ngroups": 2},
    "limits": {"dt_limit": (0.05, 0.3), "dt_max": 1.0},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def block(m: nn.Mamba2, hidden: Tensor) -> Tensor:
    """What the module computes for one sequence a row, from torch's operators and one step after the other."""
    heads, size, groups, states = m.nheads, m.headdim, m.ngroups, m.d_state
    beside, rows, (batch, length) = m.d_inner - m.d_ssm, groups * states, hidden.shape[:2]
    parts = beside, beside, m.d_ssm, m.d_ssm + 2 * rows, heads
    gate, inputs, z, u, dt = linear(hidden, m.in_proj.weight, m.in_proj.bias).split(parts, -1)
    channels = u.shape[-1]
    u = conv1d(u.mT, m.conv1d.weight, m.conv1d.bias, padding=m.d_conv - 1, groups=channels)
    x, B, C = silu(u[..., :length]).mT.split((m.d_ssm, rows, rows), -1)
    x = x.reshape(batch, length, heads, size)
    B, C = (
        p.reshape(batch, length, groups, states).repeat_interleave(heads // groups, 2)
        for p in (B, C)
    )
    steps, A = softplus(dt + m.dt_bias).clamp(*m.dt_limit), -m.A_log.exp()
    D = m.D.reshape(heads, -1)  # of heads or of channels
    h = torch.zeros(batch, heads, size, states, dtype=hidden.dtype)
    outputs = []
    for t in range(length):
        step = steps[:, t, :, None, None]
        h = torch.exp(step * A[:, None, None]) * h + step * x[:, t, :, :, None] * B[:, t, :, None]
        outputs.append(((h * C[:, t, :, None]).sum(-1) + D * x[:, t]).flatten(1))
    y = torch.stack(outputs, 1)
    if m.rmsnorm and not m.norm_before_gate:
        y = y * silu(z)
    if m.rmsnorm:
        parted = y.unflatten(-1, (groups, -1))
        parted = parted / (parted.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        y = parted.flatten(-2) * m.norm.weight
    if not m.rmsnorm or m.norm_before_gate:
        y = y * silu(z)
    return linear(torch.cat([silu(gate) * inputs, y], -1), m.out_proj.weight, m.out_proj.bias)


def made(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Mamba2:
    """Small, with a weight of the norm and D that are not 1."""
    torch.manual_seed(seed)
    m = nn.Mamba2(WIDTH, **{"d_state": 5, "headdim": 4} | options).to(dtype)
    with torch.no_grad():
        for parameter in (m.D, *(m.norm.parameters() if m.rmsnorm else ())):
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return m


def given(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH).double()


#: Of packed sequences along ``LENGTH``, one of which is empty.
BOUNDS = [0, 5, 5, 6, LENGTH]


def numbers() -> Tensor:
    """Of the sequences, by which one of them recurs."""
    sizes = torch.tensor(BOUNDS).diff()
    return torch.tensor([3, 7, 1, 3]).repeat_interleave(sizes).unsqueeze(0)
