"""selective_scan in plain torch against a loop over single numbers, and its derivatives."""

from __future__ import annotations

import cmath
import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry.kernels.selective_scan import reference


def loop(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any, z: Any, bias: Any,
    softplus: bool, initial: Any, bounds: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One number after the other, in Python's own arithmetic."""
    batch, channels, time = u.shape
    states, complex_numbers = A.shape[1], A.is_complex()
    out = torch.zeros(batch, channels, time, dtype=torch.float64)
    dtype = torch.complex128 if complex_numbers else torch.float64
    last = torch.zeros(batch, len(bounds) - 1, channels, states, dtype=dtype)

    def at(x: Tensor, b: int, d: int, n: int, t: int) -> Any:
        if x.dim() == 2:
            return x[d, n].item()
        row = x[b, n] if x.dim() == 3 else x[b, d * x.shape[1] // channels, n]
        return complex(row[2 * t], row[2 * t + 1]) if complex_numbers else row[t].item()

    for b, d, (number, begin) in product(range(batch), range(channels), enumerate(bounds[:-1])):
        h = [0.0 if initial is None else initial[b, number, d, n].item() for n in range(states)]
        for t in range(begin, bounds[number + 1]):
            size = delta[b, d, t].item() + (0.0 if bias is None else bias[d].item())
            if softplus and size <= 20:
                size = math.log1p(math.exp(size))
            y = 0.0
            for n in range(states):
                gate = cmath.exp(size * A[d, n].item())
                h[n] = gate * h[n] + size * at(B, b, d, n, t) * u[b, d, t].item()
                term = h[n] * at(C, b, d, n, t)
                y += 2 * complex(term).real if complex_numbers else complex(term).real
            y += 0.0 if D is None else D[d].item() * u[b, d, t].item()
            if z is not None:
                y *= z[b, d, t].item() / (1 + math.exp(-z[b, d, t].item()))
            out[b, d, t] = y
        last[b, number, d] = (
            torch.tensor(h, dtype=torch.complex128).to(dtype)
            if complex_numbers
            else torch.tensor([complex(x).real for x in h], dtype=dtype)
        )
    return out, last


def projection(shape: str, complex_numbers: bool) -> Tensor:
    length = 10 if complex_numbers else 5
    dtype = torch.complex128 if complex_numbers and shape == "DN" else torch.float64
    sizes = {"DN": (6, 3), "BNL": (2, 3, length), "BGNL": (2, 3, 3, length)}[shape]
    return torch.randn(sizes, dtype=dtype)


@pytest.mark.parametrize("complex_numbers", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("shape", ["DN", "BNL", "BGNL"])
@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
def test_it_is_a_loop(complex_numbers: bool, shape: str, options: bool) -> None:
    torch.manual_seed(0)
    u, delta, z = (torch.randn(2, 6, 5, dtype=torch.float64) for _ in range(3))
    dtype = torch.complex128 if complex_numbers else torch.float64
    A = -torch.rand(6, 3, dtype=dtype)
    B, C = projection(shape, complex_numbers), projection("BNL", complex_numbers)
    D, bias = torch.randn(2, 6, dtype=torch.float64)
    bias[0] = 25.0  # where softplus is the identity
    bounds = [0, 0, 2, 5]
    if options:
        initial = torch.randn(2, 3, 6, 3, dtype=dtype)
        given = (u, delta, A, B, C, D, z, bias, True, initial)
        out, last = reference.forward(*given, torch.tensor(bounds))
        expected, final = loop(*given, bounds)
    else:
        given = (u, delta, A, B, C, None, None, None, False, None)
        out, last = reference.forward(*given)
        expected, final = loop(*given, [0, 5])
        final = final[:, 0]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, final, rtol=1e-12, atol=1e-12)


def test_narrow_numbers_are_computed_in_float32() -> None:
    u = torch.randn(1, 2, 4, dtype=torch.bfloat16)
    out, last = reference.forward(
        u, u, -torch.ones(2, 3), u[:, :1].expand(1, 3, 4), u[:, :1].expand(1, 3, 4)
    )
    assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)


def test_checkpoints_are_the_states_before_their_steps() -> None:
    torch.manual_seed(0)
    u, delta = torch.randn(2, 1, 3, 7, dtype=torch.float64)
    A, B = -torch.rand(3, 2, dtype=torch.float64), torch.randn(1, 1, 2, 7, dtype=torch.float64)
    bounds = torch.tensor([0, 5, 7])
    kept = reference.checkpoints(u, delta, A, B, B, None, False, None, bounds, 2)
    assert kept.shape == (1, 5, 3, 2)
    for slot, (begin, step) in {0: (0, 0), 1: (0, 2), 2: (0, 4), 3: (5, 5)}.items():
        part = slice(begin, step)
        _, state = reference.forward(u[..., part], delta[..., part], A, B[..., part], B[..., part])
        torch.testing.assert_close(kept[:, slot], state.float())
