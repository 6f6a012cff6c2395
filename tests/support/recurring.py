"""Networks for the tests of ``rnn``: inputs, the formulas step by step, gradients and errors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.rnn.problem import SIZES, Function

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def draw(
    function: Function,
    shape: tuple[int, int, int, int] = (3, 5, 2, 4),
    dtype: torch.dtype = torch.float64,
    grad: bool = True,
) -> Inputs:
    """Wx, R, b and states for (batch, time, heads, units)."""
    batch, time, heads, dim = shape
    sizes = SIZES[function]
    drawn = (
        torch.randn(batch, time, sizes.inputs, heads, dim, dtype=dtype),
        torch.randn(sizes.recurrent, heads, dim, dim, dtype=dtype) / math.sqrt(dim),
        torch.randn(sizes.bias, heads, dim, dtype=dtype),
        # The n of sLSTM is positive, and above its floor here and there.
        torch.rand(len(sizes.states), batch, 1, heads, dim, dtype=dtype) * 3,
    )
    return tuple(tensor.requires_grad_(grad) for tensor in drawn)  # type: ignore[return-value]


def plainly(
    function: Function,
    wx: Tensor,
    r: Tensor,
    b: Tensor,
    states: Any = None,
    reset: Tensor | None = None,
    reset_states: Any = None,
) -> Tensor:
    """The formulas as they stand in the docstring, in operators that torch differentiates; every state
    after each step, (S, B, T, N, D). Shares no code with the package."""
    batch, time, _, heads, dim = wx.shape
    count = {"lstm": 2, "gru": 1, "elman": 1, "slstm": 4}[function]
    now = wx.new_zeros(count, batch, heads, dim) if states is None else states[:, :, 0]
    anew = torch.zeros_like(now) if reset_states is None else reset_states[:, :, 0]
    every = []
    for t in range(time):
        if reset is not None:
            now = torch.where(reset[:, t, None, None], anew, now)
        h, *rest = now
        rh = torch.einsum("gndp,bnp->bgnd", r, h)
        if function == "gru":
            g = rh[:, 0] + b[0]
            forgetting = torch.sigmoid(wx[:, t, 0] + rh[:, 1] + b[1])
            update = torch.sigmoid(wx[:, t, 1] + rh[:, 2] + b[2])
            new = torch.tanh(wx[:, t, 2] + b[3] + forgetting * g)
            now = torch.stack([update * h + (1 - update) * new])
        elif function == "elman":
            now = torch.tanh(wx[:, t] + rh + b).transpose(0, 1)
        else:
            i, f, z, o = (wx[:, t] + rh + b).unbind(1)
            if function == "lstm":
                c = torch.sigmoid(f) * rest[0] + torch.sigmoid(i) * torch.tanh(z)
                now = torch.stack([torch.sigmoid(o) * torch.tanh(c), c])
            else:
                c, n, m = rest
                log_f = -torch.log1p(torch.exp(-f))
                new_m = torch.where(n == 0, i, torch.maximum(i, log_f + m))
                keep, add = torch.exp(log_f + m - new_m), torch.exp(i - new_m)
                c = keep * c + add * torch.tanh(z)
                n = torch.clamp(keep * n + add, min=1)
                now = torch.stack([torch.sigmoid(o) * c / n, c, n, new_m])
        every.append(now)
    return torch.stack(every, 2)


def gradients(outputs: Any, inputs: Any) -> list[Tensor]:
    """Of a sum of all outputs, with weights that differ."""
    loss = sum((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outputs)
    return [*torch.autograd.grad(loss, inputs)]


def error(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))
