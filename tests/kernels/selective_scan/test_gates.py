"""The polynomial by which float32 gates are exact: with a 2^x that errs as a GPU's may."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from scan_registry.kernels.selective_scan.spec import FOLDER


def coefficients() -> list[float]:
    """Of the polynomial in the kernels' source, the highest power's first, down to the first power's."""
    source = (FOLDER / "tile.cuh").read_text(encoding="utf-8")
    body = source[source.index("float gate_of(") :]
    found = re.findall(r"p = (?:p \* s ([+-]) )?([\de.-]+)f;", body)
    return [float(f"{sign}{number}") for sign, number in found]


def truncated(x: Tensor) -> Tensor:
    """2^x as far as 22 bits hold it: as wrong as the instruction may be, and to the same side everywhere."""
    mantissa, exponent = torch.frexp(torch.exp2(x.double()))
    return torch.ldexp(torch.floor(mantissa * 2**22) / 2**22, exponent).float()


def gate_of(x: Tensor) -> Tensor:
    """That of the kernels, where multiplications and additions are rounded once."""
    first, *others = coefficients()
    s = (-4 * x).clamp(0, 1)
    p = torch.full_like(x, first)
    for each in others:
        p = (p.double() * s.double() + torch.tensor(each)).float()
    near = (s.double() * p.double() + 1).float()
    return near * truncated(x + s / 4)


def test_the_polynomial_is_right_to_a_unit() -> None:
    assert len(coefficients()) == 4
    x = torch.linspace(-0.25, 0, 100_001)
    right = torch.exp2(x.double())
    off = (gate_of(x) - right) / right
    assert off.abs().max() <= 2**-23
    assert off.abs().mean() <= 3e-8
    assert off.mean().abs() <= 4e-9  # no bias, which would add up
    lasting = off[:-1] / x[:-1]  # over the steps that a state lasts
    assert lasting[x[:-1] < -0.01].mean().abs() <= 1e-7


def test_other_gates_are_the_approximation() -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, 0.3, 7.0, -1.0, -100.0, -1e30, -torch.inf, torch.inf])
    right = torch.exp2(x.double()).float()
    torch.testing.assert_close(gate_of(x), right, rtol=2**-21, atol=0)
    assert gate_of(torch.tensor(torch.nan)).isnan()
