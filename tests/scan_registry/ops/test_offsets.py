"""Tensors that begin where no aligned tensor does: at an odd element of their storage, or off their own size in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import causal_conv1d, hgrn, linear_scan, nn, rg_lru, rnn, selective_scan

NARROW = (torch.bfloat16, torch.float16)


def at_odd_element(x: Tensor) -> Tensor:
    """The same numbers, one element after the beginning of their storage."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def at_half_element(x: Tensor) -> Tensor:
    """The same numbers; the address of complex ones is a multiple of half their size alone."""
    off = x.element_size() // (2 if x.is_complex() else 1)
    buffer = bytearray(x.numel() * x.element_size() + 32)
    off += -torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % 16
    return torch.frombuffer(buffer, dtype=x.dtype, count=x.numel(), offset=off).view(x.shape).copy_(x)  # fmt: skip


def results(call: Callable[..., Tensor], inputs: dict[str, Tensor]) -> list[Tensor]:
    """The output of a call, and all gradients."""
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    y = call(**leaves)
    y.abs().double().square().sum().backward()
    return [y, *(t.grad for t in leaves.values() if t.grad is not None)]


def operators(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]]:
    def of(*names: str, shape: tuple[int, ...] = (2, 4, 6)) -> dict[str, Tensor]:
        return {name: torch.rand(shape).to(dtype) for name in names}

    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    scan = of("u", "delta", "z") | of("B", "C", shape=(2, 3, 12)) | of("D", "delta_bias", shape=(4,))  # fmt: skip
    scan["A"] = torch.complex(-torch.rand(4, 3).to(wide), torch.randn(4, 3).to(wide))
    scan["initial_state"] = torch.complex(torch.rand(2, 4, 3).to(wide), torch.rand(2, 4, 3).to(wide))  # fmt: skip
    grouped = scan | of("B", shape=(2, 2, 3, 12))
    real = scan | of("B", "C", shape=(2, 3, 6)) | {"A": scan["A"].real.clone()}
    real["initial_state"] = real["initial_state"].real.clone()
    cell = of("Wx", shape=(2, 6, 4, 1, 5)) | of("R", shape=(4, 1, 5, 5)) | of("b", shape=(4, 1, 5))
    lower = of("x", "forget") | of("lower_bound", shape=(4,))
    gates = of("x", "recurrence_gate", "input_gate") | of("a_param", shape=(4,))
    return {
        "selective_scan of pairs": (selective_scan, scan),
        "selective_scan of groups of pairs": (selective_scan, grouped),
        "selective_scan": (selective_scan, real),
        "linear_scan": (linear_scan, of("gates", "tokens")),
        "causal_conv1d": (causal_conv1d, of("x") | of("weight", shape=(4, 3))),
        "hgrn": (hgrn, lower),
        "rg_lru": (rg_lru, gates),
        "rnn": (lambda **t: rnn(**t)[0], cell),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", operators(torch.float32))
def test_every_tensor_may_begin_at_an_odd_element(name: str, dtype: torch.dtype) -> None:
    call, inputs = operators(dtype)[name]
    expected = results(call, inputs)
    for moved in [[name] for name in inputs] + [[*inputs]]:
        actual = results(
            call, {k: at_odd_element(t) if k in moved else t for k, t in inputs.items()}
        )
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2 if dtype in NARROW else 1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.float32, *NARROW], ids=str
)
@pytest.mark.parametrize(("shape", "dim"), [((2, 5, 37), -1), ((2, 37, 5), 1), ((40,), 0)], ids=str)
def test_linear_scan_at_half_an_element(
    dtype: torch.dtype, shape: tuple[int, ...], dim: int
) -> None:
    torch.manual_seed(0)
    inputs: dict[str, Any] = {name: torch.rand(shape).to(dtype) * 0.9 for name in ("gates", "tokens")}  # fmt: skip
    moved = {name: at_half_element(t) for name, t in inputs.items()}
    actual, expected = (results(lambda **t: linear_scan(**t, dim=dim), t) for t in (moved, inputs))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_parameters_of_complex_layers_at_odd_elements() -> None:
    """As views of a flat buffer of all parameters."""
    x = torch.randn(2, 5, 4)
    for layer in (nn.S5(4, 6), nn.LRU(4, 4)):
        moved = {name: at_odd_element(p.detach()) for name, p in layer.named_parameters()}
        result = torch.func.functional_call(layer, moved, (x,))
        torch.testing.assert_close(result, layer(x))
