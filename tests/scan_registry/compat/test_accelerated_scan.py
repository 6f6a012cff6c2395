"""The stand-ins for accelerated-scan: its signatures, against plain loops, and without its limits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from scan_registry.compat.accelerated_scan import complex as complex_scan
from scan_registry.compat.accelerated_scan import ref, scalar, triton, warp
from scan_registry.compat.arguments import backend_for

REAL = [warp, scalar, triton, ref]
ALL = [*REAL, complex_scan]
#: Of the states, relative, by dtype: that of one rounding to it, with room for the recurrence.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex64: 1e-5,
    torch.complex128: 1e-12,
}


def loop(gates: Tensor, tokens: Tensor, reverse: bool = False) -> Tensor:
    """One step after the other, in double precision."""
    wide = torch.complex128 if gates.is_complex() else torch.float64
    gates, tokens = gates.to(wide), tokens.to(wide)
    states, x = torch.empty_like(tokens), tokens.new_zeros(tokens.shape[:-1])
    times = range(tokens.shape[-1])
    for t in reversed(times) if reverse else times:
        x = gates[..., t] * x + tokens[..., t]
        states[..., t] = x
    return states


def pair(module: ModuleType, time: int, dtype: Any = None, batch: int = 2) -> list[Tensor]:
    """Gates of |gate| ≤ 1, and tokens, as the module takes them."""
    dtype = dtype or (torch.complex64 if module is complex_scan else torch.float32)
    torch.manual_seed(time)
    gates = torch.randn(batch, 3, time, dtype=torch.complex128 if dtype.is_complex else None)
    gates = gates / (1 + gates.abs())
    return [gates.to(dtype), torch.randn(batch, 3, time, dtype=dtype)]


def close(states: Tensor, expected: Tensor) -> None:
    error = (states.to(expected.dtype) - expected).abs().max() if expected.numel() else 0.0
    scale = expected.abs().max() if expected.numel() else 1.0
    assert error <= TOLERANCE[states.dtype] * scale


# --- Signatures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (warp.scan, "gates tokens"),
        (warp.scan_forward, "gates tokens reverse"),
        (scalar.scan, "forget inputs"),
        (triton.scan, "gates tokens"),
        (complex_scan.scan, "forget inputs"),
        (ref.scan, "gates tokens mul add zeros_like ones_like reverse"),
    ],
)
def test_arguments_are_those_of_the_package(function: Callable[..., Any], names: str) -> None:
    parameters = inspect.signature(function).parameters
    assert [*parameters] == names.split()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    defaults = {
        "mul": torch.mul,
        "add": torch.add,
        "zeros_like": torch.zeros_like,
        "ones_like": torch.ones_like,
        "reverse": False,
    }
    for name, parameter in parameters.items():
        assert parameter.default == defaults.get(name, parameter.empty)


@pytest.mark.parametrize("language", ["cuda", "triton"])
def test_the_language_is_pinned_on_a_gpu_only(language: Any) -> None:
    class OnGpu:
        is_cuda = True

    on_gpu: Any = OnGpu()
    assert backend_for(on_gpu, language) == language
    assert backend_for(torch.zeros(1), language) == "auto"


# --- States -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gates", "tokens"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
    ],
    ids=str,
)
def test_dtypes_of_the_reference_promote(gates: torch.dtype, tokens: torch.dtype) -> None:
    """As torch's operators do, with the default ones and with others."""
    pair_ = torch.rand(1, 2, 4).to(gates), torch.rand(1, 2, 4).to(tokens)
    expected = torch.promote_types(gates, tokens)
    assert ref.scan(*pair_).dtype == expected
    assert ref.scan(*pair_, mul=lambda a, b: a * b).dtype == expected


@pytest.mark.parametrize("time", [0, 1, 100])
@pytest.mark.parametrize("module", ALL, ids=lambda m: m.__name__.rpartition(".")[2])
def test_any_length(module: ModuleType, time: int) -> None:
    gates, tokens = pair(module, time)
    states = module.scan(gates, tokens)
    assert states.shape == tokens.shape
    assert states.dtype == tokens.dtype
    close(states, loop(gates, tokens))


def test_warp_runs_backwards_too() -> None:
    gates, tokens = pair(warp, 50)
    close(warp.scan_forward(gates, tokens, True), loop(gates, tokens, reverse=True))
    assert torch.equal(warp.scan_forward(gates, tokens), warp.scan(gates, tokens))


def test_complex_gates_take_real_tokens() -> None:
    gates, tokens = pair(complex_scan, 60)[0], torch.randn(2, 3, 60)
    states = complex_scan.scan(gates, tokens)
    assert states.dtype == torch.complex64
    close(states, loop(gates, tokens))
    lazily = complex_scan.scan(gates.conj(), tokens)
    close(lazily, loop(gates.conj(), tokens))


# --- Derivatives ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ALL, ids=lambda m: m.__name__.rpartition(".")[2])
def test_derivatives_of_first_and_second_order(module: ModuleType) -> None:
    dtype = torch.complex128 if module is complex_scan else torch.float64
    inputs = [t.requires_grad_() for t in pair(module, 5, dtype, batch=1)]
    assert gradcheck(module.scan, inputs)
    assert gradgradcheck(module.scan, inputs)


def test_real_tokens_have_a_real_gradient() -> None:
    gates = pair(complex_scan, 5, torch.complex128)[0].requires_grad_()
    tokens = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(TypeError, match="float64 does not mix"):
        complex_scan.scan(gates.to(torch.complex64), tokens)
    assert gradcheck(complex_scan.scan, (gates, tokens))
    complex_scan.scan(gates, tokens).abs().sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.dtype == torch.float64


# --- ref: any multiplication and addition -----------------------------------------------------


def minus_infinity_like(x: Tensor) -> Tensor:
    return torch.full_like(x, -torch.inf)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("time", [0, 1, 2, 5, 16, 17, 100])
def test_ref_scans_logarithms(time: int, reverse: bool) -> None:
    torch.manual_seed(time)
    gates, tokens = torch.rand(2, 2, 3, time, dtype=torch.float64)
    states = ref.scan(
        gates.log(),
        tokens.log(),
        mul=torch.add,
        add=torch.logaddexp,
        zeros_like=minus_infinity_like,
        ones_like=torch.zeros_like,
        reverse=reverse,
    )
    close(states.exp(), loop(gates, tokens, reverse))


def test_ref_multiplies_from_the_left() -> None:
    """2 × 2 matrices, one along the channels: their product depends on the order."""
    torch.manual_seed(0)
    gates, tokens = torch.randn(2, 1, 4, 13, dtype=torch.float64)

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        batch, _, count = a.shape
        left, right = (t.permute(0, 2, 1).reshape(batch, count, 2, 2) for t in (a, b))
        return (left @ right).reshape(batch, count, 4).permute(0, 2, 1)

    states = ref.scan(gates, tokens, mul=matmul)
    x = torch.zeros(1, 4, 1, dtype=torch.float64)
    for t in range(13):
        x = matmul(gates[..., t : t + 1], x) + tokens[..., t : t + 1]
        torch.testing.assert_close(states[..., t : t + 1], x)


def test_ref_starts_from_zeros_like() -> None:
    gates, tokens = pair(ref, 21, torch.float64)
    start = torch.randn(2, 3, 1, dtype=torch.float64)
    states = ref.scan(gates, tokens, zeros_like=start.expand_as)
    moved = torch.cat((tokens[..., :1] + gates[..., :1] * start, tokens[..., 1:]), -1)
    close(states, loop(gates, moved))


def test_ref_with_other_operators_is_differentiable() -> None:
    gates, tokens = (t.requires_grad_() for t in pair(ref, 6, torch.float64, batch=1))

    def scan(gates: Tensor, tokens: Tensor) -> Tensor:
        return ref.scan(gates, tokens, lambda a, b: 2 * a * b)

    assert gradcheck(scan, (gates, tokens))
    assert gradgradcheck(scan, (gates, tokens))


def test_ref_does_not_go_on_step_by_step() -> None:
    calls = []

    def count(a: Tensor, b: Tensor) -> Tensor:
        calls.append(a.shape)
        return torch.mul(a, b)

    ref.scan(*pair(ref, 4096), mul=count)
    assert len(calls) < 40


# --- Bad input --------------------------------------------------------------------------------


def test_complex_gates_have_to_be_complex() -> None:
    gates, tokens = pair(scalar, 8)
    with pytest.raises(TypeError, match=r"forget has dtype torch.float32; it must be a complex"):
        complex_scan.scan(gates, tokens)


@pytest.mark.parametrize("name", ["mul", "add", "zeros_like", "ones_like"])
def test_operators_have_to_be_functions(name: str) -> None:
    operators: dict[str, Any] = {name: 3}
    with pytest.raises(TypeError, match=f"{name} is 3; it must be a function"):
        ref.scan(*pair(ref, 8), **operators)


# --- On a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("module", ALL, ids=lambda m: m.__name__.rpartition(".")[2])
def test_on_a_gpu(module: ModuleType) -> None:
    inputs = [t.cuda().requires_grad_() for t in pair(module, 1000)]
    states = module.scan(*inputs)
    close(states.detach().cpu(), loop(*(t.detach().cpu() for t in inputs)))
    grads = torch.autograd.grad(states.abs().sum(), inputs)
    here = [t.detach().cpu().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(module.scan(*here).abs().sum(), here)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.cpu(), other, rtol=1e-3, atol=1e-3)
