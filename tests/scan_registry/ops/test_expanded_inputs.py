"""Gradients of bfloat16 inputs that are the same at all steps, against float64 of the same numbers.

Such an input is expanded along batch and time, and its gradient is a sum over both. Every step's gradient is rounded to bfloat16
where the operator writes it, and torch adds them up in float32. So the error can be large beside the sum where steps cancel one
another, as they do for sLSTM's gates i and f: c/n hardly changes with them if all steps are equal. It cannot be large beside the
sum of absolute values. Plain torch rounds in the same places, and in more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scan_registry import (
    causal_conv1d,
    hgrn,
    linear_scan,
    min_gru,
    min_lstm,
    rg_lru,
    rnn,
    selective_scan,
)

BATCH, TIME, UNITS = 3, 11, (7, 32, 48)
#: Rounding to bfloat16.
ROUNDING = 2.0**-9
#: A step's gradient is a product of factors that are rounded in memory: two gates, two states, and the product itself.
FACTORS = 5
#: How many gates have inputs, recurrent matrices and biases.
GATES = {"lstm": (4, 4, 4), "gru": (3, 3, 4), "elman": (1, 1, 1), "slstm": (4, 4, 4)}


def plain(function: str, Wx: Tensor, R: Tensor, b: Tensor) -> Tensor:
    """h (B, T, D), in torch's operators and in the dtype of the inputs."""
    h = c = n = m = Wx.new_zeros(BATCH, Wx.shape[-1])
    states = []
    for t in range(TIME):
        x, r = Wx[:, t, :, 0].unbind(1), [h @ each[0].T for each in R]
        if function == "gru":
            z = (x[1] + r[2] + b[2, 0]).sigmoid()
            new = x[2] + b[3, 0] + (x[0] + r[1] + b[1, 0]).sigmoid() * (r[0] + b[0, 0])
            h = z * h + (1 - z) * new.tanh()
            states.append(h)
            continue
        p = [one + other + each[0] for one, other, each in zip(x, r, b, strict=True)]
        if function == "elman":
            h = p[0].tanh()
        elif function == "lstm":
            c = p[1].sigmoid() * c + p[0].sigmoid() * p[2].tanh()
            h = p[3].sigmoid() * c.tanh()
        elif function == "slstm":
            log_f = logsigmoid(p[1])
            old, m = m, torch.maximum(p[0], log_f + m) if t else p[0]
            e, k = (p[0] - m).exp(), (log_f + old - m).exp()
            c, n = k * c + e * p[2].tanh(), k * n + e
            h = p[3].sigmoid() * c / n
        states.append(h)
    return torch.stack(states, 1)


class Errors:
    """Distances from float64, beside the exact gradient's norm; ``bound`` is what rounding in memory can make of them."""

    def __init__(self, call: Callable[..., Tensor], leaves: dict[str, Tensor], shapes: Any) -> None:
        self.shapes, self.leaves = shapes, leaves
        self.exact = self.gradients(call, torch.float64)
        whole = self.gradients(call, torch.float64, whole=True)
        self.bounds = {
            name: FACTORS * ROUNDING * float(whole[name].abs().sum_to_size(leaf.shape).norm() / self.exact[name].norm())
            for name, leaf in leaves.items()
        }  # fmt: skip

    def gradients(
        self, call: Callable[..., Tensor], dtype: torch.dtype, whole: bool = False
    ) -> dict[str, Tensor]:
        """Of the expanded leaves; of every element of the expanded tensors by itself if ``whole``."""
        given = {name: t.to(dtype, copy=True) for name, t in self.leaves.items()}
        if whole:
            given = {name: t.expand(self.shapes[name]).clone() for name, t in given.items()}
        given = {name: t.requires_grad_() for name, t in given.items()}
        y = call(**{name: t.expand(self.shapes[name]) for name, t in given.items()})
        torch.manual_seed(1)
        y.backward(torch.randn(y.shape).bfloat16().to(y.dtype))
        return {name: t.grad for name, t in given.items() if t.grad is not None}

    def of(self, call: Callable[..., Tensor]) -> dict[str, float]:
        found = self.gradients(call, torch.bfloat16)
        return {
            name: float((found[name].double() - exact).norm() / exact.norm())
            for name, exact in self.exact.items()
        }


def cell(function: Any, units: int) -> tuple[Errors, Callable[..., Tensor], Callable[..., Tensor]]:
    torch.manual_seed(units)
    inputs, recurrent, biases = GATES[function]
    Wx = torch.randn(1, 1, inputs, 1, units).bfloat16()
    leaves = {"Wx": Wx, "R": (torch.randn(recurrent, 1, units, units) / units**0.5).bfloat16()}
    leaves["b"] = torch.randn(biases, 1, units).bfloat16()
    shapes = {name: t.shape for name, t in leaves.items()}
    shapes["Wx"] = torch.Size((BATCH, TIME, *Wx.shape[2:]))

    def ours(**given: Tensor) -> Tensor:
        return rnn(**given, function=function)[0][0][..., 0, :]

    def torchs(**given: Tensor) -> Tensor:
        return plain(function, **given)

    return Errors(ours, leaves, shapes), ours, torchs


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("function", GATES)
def test_cells_are_as_exact_as_plain_torch(function: str, units: int) -> None:
    errors, ours, torchs = cell(function, units)
    exact = errors.gradients(torchs, torch.float64)
    torch.testing.assert_close(errors.exact, exact)
    found, other = errors.of(ours), errors.of(torchs)
    for name in found:
        assert found[name] <= max(other[name], errors.bounds[name]), (found, other, errors.bounds)


def scans() -> Iterator[Any]:
    """Each with the shapes of what is expanded and those that it is expanded to."""
    one, every = (1, 5, 1), (BATCH, 5, TIME)
    channels, projection = {(5,): (5,)}, {(1, 4, 1): (BATCH, 4, TIME)}
    for scan, names in {
        linear_scan: ["gates", "tokens"],
        min_gru: ["gate", "hidden"],
        min_lstm: ["forget", "input", "hidden"],
        rg_lru: ["x", "recurrence_gate", "input_gate", "a_param"],
        hgrn: ["x", "forget"],
        causal_conv1d: ["x", "weight"],
        selective_scan: ["u", "delta", "A", "B", "C", "z"],
    }.items():
        shapes: dict[str, Any] = {name: {one: every} for name in names}
        shapes |= {"a_param": channels, "weight": {(5, 4): (5, 4)}, "A": {(5, 4): (5, 4)}}
        shapes |= {"B": projection, "C": projection}
        yield pytest.param(scan, {name: shapes[name] for name in names}, id=scan.__name__)


@pytest.mark.parametrize(("scan", "shapes"), scans())
def test_scans_of_expanded_inputs(scan: Any, shapes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    leaves, expanded = {}, {}
    for name, pair in shapes.items():
        ((shape, expanded[name]),) = pair.items()
        drawn = torch.randn(shape)
        positive = name in ("gates", "delta")
        leaves[name] = (
            drawn.sigmoid() if positive else -drawn.exp() if name == "A" else drawn
        ).bfloat16()
    errors = Errors(scan, leaves, expanded)
    found = errors.of(scan)
    assert all(found[name] <= errors.bounds[name] for name in found), (found, errors.bounds)
