"""Layers for ``kernels.kernelize``. tests/ci/test_hub.py puts them into transformers' models."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from scan_registry.compat import hub_layers


class Norm(nn.Module):
    """What transformers' gated norms have."""

    def __init__(self, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, dtype=dtype))
        self.variance_epsilon = 1e-5
        self.activation = activation


def normed(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    return hub_layers.RMSNormGated.forward(module, x, gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "function"), [("silu", silu), ("sigmoid", torch.sigmoid)])
def test_gated_norms(activation: str, function: Any, dtype: torch.dtype) -> None:
    module = Norm(activation, dtype)
    x, gate = torch.randn(2, 3, 16).to(dtype)[:, None]
    y = normed(module, x, gate)
    scale = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = x.double() * scale * module.weight.double() * function(gate.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected.to(dtype))


def test_a_norm_with_another_activation_is_refused() -> None:
    x = torch.randn(3, 16)
    with pytest.raises(ValueError, match="activation is 'gelu'; accepted are 'silu' and 'sigmoid'"):
        normed(Norm("gelu", torch.float32), x, x)


@pytest.mark.parametrize("name", hub_layers.__all__)
def test_layers_have_no_state_and_no_members_of_their_own(name: str) -> None:
    layer = getattr(hub_layers, name)
    members = {member for member, _ in inspect.getmembers(layer)}
    assert layer.__init__ is nn.Module.__init__
    assert members - {member for member, _ in inspect.getmembers(nn.Module)} == {
        "can_torch_compile",
        "has_backward",
    }


def test_steps_record_no_derivative_and_say_so() -> None:
    """``kernelize`` for training leaves them out."""
    assert {name for name in hub_layers.__all__ if not getattr(hub_layers, name).has_backward} == {
        "causal_conv1d_update",
        "selective_state_update",
    }
    x, state, weight = (
        torch.randn(2, 4, 1),
        torch.zeros(2, 4, 3),
        torch.rand(4, 3, requires_grad=True),
    )
    assert not hub_layers.causal_conv1d_update()(x, state, weight).requires_grad
    A, B = -torch.rand(4, 8, requires_grad=True), torch.randn(2, 8)
    state, x = torch.zeros(2, 4, 8), x[..., 0]
    assert not hub_layers.selective_state_update()(state, x, x, A, B, B).requires_grad


def test_options_that_a_function_does_not_know_are_ignored() -> None:
    x, weight = torch.randn(2, 4, 6), torch.rand(4, 3)
    layer = hub_layers.causal_conv1d_fn()
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2, dtype=torch.int32)
    y = layer(x, weight, activation="silu", seq_idx=seq_idx, something="else")
    halves = [layer(part, weight, activation="silu") for part in x.chunk(2, -1)]
    torch.testing.assert_close(y, torch.cat(halves, -1))
