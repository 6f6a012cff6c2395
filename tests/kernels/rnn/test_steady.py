"""The gradients of an sLSTM whose inputs are the same at all steps, on the CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import rnn
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.rnn import reference

#: Of each gate's gradient by itself. Taken from differences of rounded states, f's was wrong by 0.11 in bfloat16.
TOLERANCE = {"float32": 1e-4, "float16": 6e-3, "bfloat16": 5e-2}


def draw(dim: int, dtype: str, device: str) -> list[Tensor]:
    """Wx, R and b: f keeps most of a state."""
    torch.manual_seed(0)
    wx, r, b = (
        torch.randn(4, 1, dim),
        torch.randn(4, 1, dim, dim) / dim**0.5,
        torch.randn(4, 1, dim),
    )
    b[1] += 4
    return [t.to(device, getattr(torch, dtype)) for t in (wx.expand(3, 11, -1, -1, -1), r, b)]


def loop(wx: Tensor, r: Tensor, b: Tensor) -> Tensor:
    """h as the formulas have it, where m is no more than what keeps exponentials finite."""
    h = c = n = m = torch.zeros_like(wx[:, 0, 0])
    found = []
    for t in range(wx.shape[1]):
        i, f, z, o = (wx[:, t] + torch.einsum("bnp,gnqp->bgnq", h, r) + b).unbind(1)
        decayed = torch.nn.functional.logsigmoid(f) + m
        m = (i if t == 0 else torch.maximum(i, decayed)).detach()
        old = (decayed - m).exp() if t > 0 else torch.zeros_like(m)
        c, n = old * c + (i - m).exp() * z.tanh(), old * n + (i - m).exp()
        h = o.sigmoid() * c / n
        found.append(h)
    return torch.stack(found, 1)


def gate_errors(dim: int, dtype: str, device: str, backend: Any) -> list[float]:
    tensors = draw(dim, dtype, device)
    wx = tensors[0].clone().requires_grad_()
    states, _ = rnn(wx, *tensors[1:], function="slstm", backend=backend)
    weight = torch.randn_like(states[0])
    (grad,) = torch.autograd.grad(states[0], wx, weight)
    exact = [t.double() for t in tensors]
    exact[0].requires_grad_()
    (expected,) = torch.autograd.grad(loop(*exact), exact[0], weight.double())
    pairs = zip(grad.unbind(2), expected.unbind(2), strict=True)
    return [relative_error(out, each) for out, each in pairs]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [7, 32, 48])
def test_each_gate_has_the_gradient_of_a_float64_loop(dim: int, dtype: str) -> None:
    assert max(gate_errors(dim, dtype, "cpu", "auto")) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda_fused", "cuda_alternating", "triton"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [16, 32, 48])
def test_each_gate_has_it_on_a_gpu(dim: int, dtype: str, backend: str) -> None:
    if backend == "triton" and dtype == "float32" and dim > 32:
        pytest.skip("Triton's kernels take heads of up to 32 units in float32")
    assert max(gate_errors(dim, dtype, "cuda", backend)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_c_and_n_are_right(dtype: torch.dtype) -> None:
    """Of all states and the last ones, where n is at its floor, zero or usual, and c/n more than z can make it."""
    torch.manual_seed(0)
    x, r, b = torch.randn(3, 40, 4, 2, 16), torch.randn(4, 2, 16, 16) / 4, torch.randn(4, 2, 16)
    initial, grads = torch.rand(4, 3, 2, 16) + 1, torch.randn(4, 3, 40, 2, 16)
    initial[1:3, ..., ::3], initial[1, ..., 1], initial[2, ..., 2], grads[3] = 0, 9, 0.3, 0
    final = grads[:, :, 0].clone()

    def solve(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        wx, rr, bb, start, given, end = (t.to(dtype) for t in narrow)
        states, cache = reference.forward("slstm", wx, rr, bb, start)
        return reference.backward("slstm", rr, states, start, cache, given, end)

    narrow = [t.to(dtype) for t in (x, r, b, initial, grads, final)]
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for out, expected in zip(solve(dtype), solve(torch.float64), strict=True):
        assert relative_error(out, expected) <= bound
