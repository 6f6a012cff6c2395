"""Copies of arguments live until the compiled code for the CPU has read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import scan_registry as sr
from scan_registry.kernels.causal_conv1d.op import cpu as convolutions
from scan_registry.kernels.rnn.op import cpu as networks
from scan_registry.kernels.selective_scan.op import cpu as selective_scans

SIDE = 24  # of the square matrices that are passed transposed


class Reusing:
    """The module ``_cpu``, with memory that was freed before a call filled with NaN."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)

        def call(*args: Any) -> Any:
            junk = [torch.full((SIDE, SIDE), torch.nan) for _ in range(16)]
            assert len(junk) == 16
            return function(*args)

        return call


def turned(*shape: int) -> Tensor:
    return torch.rand(*shape[:-2], shape[-1], shape[-2]).mT.requires_grad_()


def selective() -> Tensor:
    u, delta = (torch.rand(1, SIDE, 5, requires_grad=True) for _ in range(2))
    B, C = (torch.rand(1, SIDE, 5) for _ in range(2))
    A = turned(SIDE, SIDE)
    (grad,) = torch.autograd.grad(sr.selective_scan(u, delta, -A, B, C).sum(), A)
    return grad


def convolution() -> Tensor:
    x = torch.rand(SIDE, SIDE, 5, requires_grad=True)
    state = turned(SIDE, SIDE, 1)[..., :1]
    weight = turned(SIDE, 2)
    grads = torch.autograd.grad(
        sr.causal_conv1d(x, weight, initial_state=state).square().sum(), (x, weight)
    )
    return torch.cat([grad.flatten() for grad in grads])


def network() -> Tensor:
    inputs = torch.rand(2, 5, 1, 1, SIDE, requires_grad=True)
    recurrent = turned(1, 1, SIDE, SIDE)
    states, _ = sr.rnn(inputs, recurrent, None, function="elman")
    (grad,) = torch.autograd.grad(states.sum(), inputs)
    return grad


@pytest.mark.parametrize(
    ("module", "call"),
    [(selective_scans, selective), (convolutions, convolution), (networks, network)],
    ids=["selective_scan", "causal_conv1d", "rnn"],
)
def test_copies_outlive_the_call(
    module: Any, call: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    expected = call()
    assert expected.isfinite().all()
    monkeypatch.setattr(module, "_cpu", Reusing(module._cpu))
    torch.manual_seed(0)
    torch.testing.assert_close(call(), expected, rtol=0, atol=0)
