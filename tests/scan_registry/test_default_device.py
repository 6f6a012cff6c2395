"""Tensors of one device under another default device, as ``torch.set_default_device`` or ``with torch.device(...)`` sets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import MODULES, output
from torch import Tensor

import scan_registry

CPU: Any = torch.device("cpu")


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, device=CPU, dtype=dtype, requires_grad=True)


def rnn(backend: str) -> Tensor:
    return scan_registry.rnn(rand(2, 3, 4, 1, 6), rand(4, 1, 6, 6), None, backend=backend)[0]


def packed(backend: str) -> Tensor:
    bounds = torch.tensor([0, 2, 5], device=CPU)
    how: Any = {"cu_seqlens": bounds, "return_final_state": True, "backend": backend}
    return scan_registry.linear_scan(rand(2, 5), rand(2, 5), **how)[1]


def reset(backend: str) -> Tensor:
    marks = torch.ones(2, 5, dtype=torch.bool, device=CPU)
    return scan_registry.linear_scan(rand(2, 5), rand(2, 5), reset=marks, backend=backend)


OPERATORS: dict[str, Callable[[str], Tensor]] = {
    "linear_scan": lambda b: scan_registry.linear_scan(rand(2, 5), rand(2, 5), backend=b),
    "linear_scan, packed": packed,
    "linear_scan, reset": reset,
    "rg_lru": lambda b: scan_registry.rg_lru(
        *(rand(2, 8, 5) for _ in range(3)), rand(8), backend=b
    ),
    "min_gru": lambda b: scan_registry.min_gru(rand(2, 5, 8), rand(2, 5, 8), backend=b),
    "selective_scan": lambda b: scan_registry.selective_scan(
        *(rand(1, 4, 5), rand(1, 4, 5), rand(4, 2), rand(1, 2, 5), rand(1, 2, 5)), backend=b
    ),
    "causal_conv1d": lambda b: scan_registry.causal_conv1d(rand(1, 4, 5), rand(4, 3), backend=b),
    "rnn": rnn,
}


@pytest.fixture(autouse=True)
def _another_default_device() -> Any:
    # A tensor that is made without a device cannot meet those of the CPU.
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, backend: str) -> None:
    out = OPERATORS[name](backend)
    assert out.device == CPU
    out.sum().backward()


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    module = MODULES[name](device=CPU)
    x = rand(3, 9, 8)
    out = module(x)
    output(out).abs().sum().backward()
    assert x.grad is not None
    assert {p.grad.device for p in module.parameters() if p.grad is not None} == {CPU}
