"""The stand-ins for sequential_scan: its signatures, against plain loops, and without its limits."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scan_registry.compat.sequential_scan import scan_cu, scan_cu_single, scan_tr

Scan = Callable[[Tensor, Tensor], Tensor]

SCANS = pytest.mark.parametrize("scan", [scan_cu, scan_cu_single, scan_tr])


def loop(alpha: Tensor, beta: Tensor) -> Tensor:
    """One step after the other, in double precision, from the first token."""
    alpha, beta = alpha.double(), beta.double()
    states = beta.clone()
    for t in range(1, beta.shape[1]):
        states[:, t] = alpha[:, t] * states[:, t - 1] + beta[:, t]
    return states


def pair(time: int, width: int = 5, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(time)
    alpha = torch.rand(2, time, width) * 2 - 1
    return [alpha.to(dtype), torch.randn(2, time, width).to(dtype)]


def error(states: Tensor, expected: Tensor) -> float:
    return float((states.double() - expected).norm() / expected.norm())


@SCANS
def test_arguments_are_those_of_the_package(scan: Scan) -> None:
    parameters = inspect.signature(scan).parameters
    assert [*parameters] == ["alpha", "beta"]
    assert all(p.default is p.empty for p in parameters.values())
    assert f"``sequential_scan.{scan.__name__}``" in (scan.__doc__ or "")


@SCANS
@pytest.mark.parametrize(("time", "width"), [(1, 5), (2, 7), (100, 513)])
def test_any_length_and_width(scan: Scan, time: int, width: int) -> None:
    alpha, beta = pair(time, width)
    states = scan(alpha, beta)
    assert states.dtype == torch.float32
    assert error(states, loop(alpha, beta)) < 1e-6
    assert torch.equal(states[:, 0], beta[:, 0])


@SCANS
def test_no_steps(scan: Scan) -> None:
    assert scan(*pair(0)).shape == (2, 0, 5)


@SCANS
@pytest.mark.parametrize("time", [1, 3, 50])
def test_gradients_are_those_of_the_loop(scan: Scan, time: int) -> None:
    """Among them that of the first gate, which is zero."""
    inputs = [t.requires_grad_() for t in pair(time)]
    seed = torch.randn(2, time, 5)
    grads = torch.autograd.grad(scan(*inputs), inputs, seed)
    assert not grads[0][:, 0].any()
    wide = [t.detach().double().requires_grad_() for t in inputs]
    x, states = wide[1][:, 0], [wide[1][:, 0]]
    for t in range(1, time):
        x = wide[0][:, t] * x + wide[1][:, t]
        states.append(x)
    expected = torch.autograd.grad(torch.stack(states, 1), wide, seed.double(), allow_unused=True)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(
            grad, torch.zeros_like(grad) if other is None else other.float(), rtol=1e-4, atol=1e-5
        )


@SCANS
def test_the_first_gate_matters_only_if_it_is_not_finite(scan: Scan) -> None:
    """Then the states of its channel are NaN, and no others; zeroing it is the way out."""
    alpha, beta = pair(20)
    expected = scan(alpha, beta)
    alpha[:, 0] = 1e30
    torch.testing.assert_close(scan(alpha, beta), expected)
    for value in (torch.nan, torch.inf):
        alpha[1, 0, 3] = value
        states = scan(alpha, beta)
        wrong = torch.zeros_like(states, dtype=torch.bool)
        wrong[1, :, 3] = True
        assert torch.equal(states.isnan(), wrong)
        torch.testing.assert_close(states[~wrong], expected[~wrong])
        alpha = alpha.clone()
        alpha[:, 0] = 0
        torch.testing.assert_close(scan(alpha, beta), expected)


def test_autocast_converts_to_bfloat16() -> None:
    inputs = [t.requires_grad_() for t in pair(30)]
    wide = [t.detach().double() for t in inputs]
    with torch.autocast("cpu", torch.float16):  # whatever the region's own dtype is
        assert scan_cu(*inputs).dtype == scan_tr(*inputs).dtype == torch.bfloat16
        assert scan_cu_single(*inputs).dtype == torch.float32
        assert scan_cu(*wide).dtype == torch.float64
        grads = torch.autograd.grad(scan_tr(*inputs).float().sum(), inputs)
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert scan_cu(*inputs).dtype == torch.float32


@pytest.mark.gpu
@SCANS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(scan: Scan, dtype: torch.dtype) -> None:
    alpha, beta = pair(1000, 520, dtype)
    inputs = [t.cuda().requires_grad_() for t in (alpha, beta)]
    states = scan(*inputs)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    assert error(states.detach().cpu(), loop(alpha, beta)) < tolerance
    grads = torch.autograd.grad(states.sum(), inputs)
    assert not grads[0][:, 0].any()
