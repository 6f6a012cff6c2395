"""Gradients of bfloat16 inputs that are the same at all steps, against float64 of the same numbers.

Such an input is expanded along batch and time, and its gradient is a sum over both. Every step's gradient is rounded to bfloat16
where the operator writes it, and torch adds them up in float32. So the error can be large beside the sum where steps cancel one
another, as they do for sLSTM's gates i and f: c/n hardly changes with them if all steps are equal. It cannot be large beside the
sum of absolute values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

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

BATCH, TIME, UNITS = 3, 11, (32, 48)
#: Rounding to bfloat16.
ROUNDING = 2.0**-9
#: A step's gradient is a product of factors that are rounded in memory: two gates, two states, and the product itself.
FACTORS = 5
#: How many gates have inputs, recurrent matrices and biases.
GATES = {"lstm": (4, 4, 4), "gru": (3, 3, 4), "elman": (1, 1, 1), "slstm": (4, 4, 4)}


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
        inputs = {name: t.to(dtype, copy=True) for name, t in self.leaves.items()}
        if whole:
            inputs = {name: t.expand(self.shapes[name]).clone() for name, t in inputs.items()}
        inputs = {name: t.requires_grad_() for name, t in inputs.items()}
        y = call(**{name: t.expand(self.shapes[name]) for name, t in inputs.items()})
        torch.manual_seed(1)
        y.backward(torch.randn(y.shape).bfloat16().to(y.dtype))
        return {name: t.grad for name, t in inputs.items() if t.grad is not None}

    def of(self, call: Callable[..., Tensor]) -> dict[str, float]:
        result = self.gradients(call, torch.bfloat16)
        return {
            name: float((result[name].double() - exact).norm() / exact.norm())
            for name, exact in self.exact.items()
        }


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("function", GATES)
def test_cells_of_expanded_inputs(function: Any, units: int) -> None:
    torch.manual_seed(units)
    inputs, recurrent, biases = GATES[function]
    Wx = torch.randn(1, 1, inputs, 1, units).bfloat16()
    leaves = {"Wx": Wx, "R": (torch.randn(recurrent, 1, units, units) / units**0.5).bfloat16()}
    leaves["b"] = torch.randn(biases, 1, units).bfloat16()
    shapes = {name: t.shape for name, t in leaves.items()}
    shapes["Wx"] = torch.Size((BATCH, TIME, *Wx.shape[2:]))

    def cell(**tensors: Tensor) -> Tensor:
        return rnn(**tensors, function=function)[0][0][..., 0, :]

    errors = Errors(cell, leaves, shapes)
    distances = errors.of(cell)
    assert all(distances[name] <= errors.bounds[name] for name in leaves), distances


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
    result = errors.of(scan)
    assert all(result[name] <= errors.bounds[name] for name in result), (result, errors.bounds)
