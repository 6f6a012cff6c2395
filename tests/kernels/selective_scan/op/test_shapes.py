"""``selective_scan`` on the CPU in every dtype, of shapes and options of all kinds, against a loop in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import selective_scan
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import reference

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
OPTIONS = ("D", "z", "delta_bias", "initial_state")
#: Batch, channels, time, states and groups.
SHAPES = (
    (1, 1, 1, 1, 1),
    (2, 3, 7, 4, 1),
    (3, 6, 31, 16, 2),
    (1, 5, 97, 17, 5),
    (1, 8, 211, 64, 1),
    (1, 2, 53, 256, 2),
    (2, 13, 128, 16, 1),
    (1, 2, 1009, 3, 1),
)


def drawn(
    sizes: tuple[int, ...], dtype: torch.dtype, softplus: bool, sequences: int
) -> dict[str, Tensor]:
    batch, channels, time, states, groups = sizes
    torch.manual_seed(sum(sizes))
    steps = torch.randn(batch, channels, time) - 3
    between = (sequences,) if sequences else ()
    B, C = torch.randn(2, batch, groups, states, time).to(dtype)
    return {
        "u": torch.randn(batch, channels, time).to(dtype),
        "delta": (steps if softplus else steps.exp()).to(dtype),
        "A": -4 * torch.rand(channels, states),
        "B": B,
        "C": C,
        "D": torch.randn(channels),
        "z": torch.randn(batch, channels, time).to(dtype),
        "delta_bias": torch.rand(channels) / 2,
        "initial_state": torch.randn(batch, *between, channels, states),
    }


def results(made: Any, leaves: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs, and all gradients, of gradients of the outputs that are rounded alike."""
    torch.manual_seed(7)
    grads = [torch.randn(x.shape).to(dtype).to(x.dtype) for x in made]
    return [x.detach() for x in (*made, *torch.autograd.grad(made, leaves.values(), grads))]


def compare(given: dict[str, Tensor], **options: Any) -> None:
    dtype = given["u"].dtype
    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    found = results(selective_scan(**leaves, return_final_state=True, **options), leaves, dtype)
    wide = {name: t.double().requires_grad_() for name, t in given.items()}
    expected = results(reference.forward(**wide, **options), wide, dtype)
    names = "out", "final_state", *given
    for name, out, right in zip(names, found, expected, strict=True):
        assert relative_error(out, right) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_shapes(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(drawn(sizes, dtype, True, 0), delta_softplus=True)


@pytest.mark.parametrize("softplus", [False, True], ids=["", "softplus"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_every_set_of_options(softplus: bool, packed: bool) -> None:
    bounds = torch.tensor([0, 0, 11, 23]) if packed else None
    for there in product((False, True), repeat=len(OPTIONS)):
        given = drawn((2, 6, 23, 5, 3), torch.float32, softplus, 3 if packed else 0)
        for name, keep in zip(OPTIONS, there, strict=True):
            if not keep:
                del given[name]
        compare(given, delta_softplus=softplus, cu_seqlens=bounds)


def test_steps_of_every_size() -> None:
    """Above 20 softplus is the identity; of a step of 0 nothing enters, and all of the state stays."""
    given = drawn((1, 4, 16, 3, 1), torch.float32, True, 0)
    given["delta"] = torch.linspace(-30, 40, 64).view(1, 4, 16)
    given["A"] = given["A"] / 100
    compare(given, delta_softplus=True)
    given["delta"] = torch.zeros(1, 4, 16)
    del given["delta_bias"]
    out, last = selective_scan(**given, return_final_state=True)
    torch.testing.assert_close(last, given["initial_state"])
    assert out.isfinite().all()
