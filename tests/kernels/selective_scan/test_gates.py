"""Why float32 gates have a polynomial: a model of selective_scan's kernels, with a 2^x that errs as a GPU's may."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import cases
from scan_registry.kernels.selective_scan.spec import FOLDER

LOG2_E = torch.tensor(1.4426950408889634)


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


class Errors(NamedTuple):
    A_grad: float
    final_state: float
    initial_grad: float


def errors(exp2: Callable[[Tensor], Tensor]) -> Errors:
    """Of a scan in float32, whose gradient of A is summed as the kernel sums it: over each 32 steps, and over those with
    what is lost in rounding."""
    torch.manual_seed(0)
    setting = cases.Setting(gated=False, starts=True)
    trial = cases.draw((1, 16, 512, 8), setting, "float32", "cpu")
    u, delta, A, B, C, state, out_grad, final_grad = (
        trial.inputs[name]
        for name in ("u", "delta", "A", "B", "C", "initial_state", "out_grad", "final_grad")
    )
    size = torch.nn.functional.softplus(delta.double()).float()
    gates = exp2(size.unsqueeze(2) * (A * LOG2_E).unsqueeze(-1))
    tokens = (size * u).unsqueeze(2) * B
    states = [state.squeeze(1)]
    for t in range(u.shape[2]):
        states.append(gates[..., t] * states[-1] + tokens[..., t])
    back = final_grad.squeeze(1)
    total, lost, tile = (torch.zeros_like(back) for _ in range(3))
    for t in reversed(range(u.shape[2])):
        back = (out_grad[:, :, t, None] * C[..., t] + back) * gates[..., t]
        tile = tile + back * states[t] * size[:, :, t, None]
        if t % 32 == 0:
            total, before = total + tile, total
            lost += (before - (total - (total - before))) + (tile - (total - before))
            tile = torch.zeros_like(tile)
    found = {
        "A_grad": (total + lost).sum(0),
        "final_state": states[-1].unsqueeze(1),
        "initial_grad": back.unsqueeze(1),
    }
    return Errors(**{name: relative_error(x, trial.expected[name]) for name, x in found.items()})


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


def test_the_gradient_of_A_needs_it() -> None:
    """Errors of gates add up over the steps that a state lasts; most of all in this gradient."""
    approximate, exact = errors(truncated), errors(gate_of)
    assert approximate.A_grad > 4 * cases.TOLERANCE["float32"]
    assert approximate.A_grad > 1.5 * approximate.final_state
    assert max(exact) <= 1e-6
