"""Gradients of a compiled call that changes states in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scan_registry import nn


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("Mamba", marks=pytest.mark.thorough), "Mamba2"])
def test_gradients_are_those_of_the_states_before_the_call(name: str) -> None:
    """By Inductor, as other backends drop no copies."""
    block = nn.Mamba(8) if name == "Mamba" else nn.Mamba2(8, d_state=4, headdim=8)
    x = torch.randn(2, 6, 8)
    compiled = torch.compile(block, fullgraph=True)

    def gradients(function: torch.nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        states = tuple(torch.randn_like(state) for state in block.allocate_inference_cache(2, 0))
        loss = sum(function(part, states=states).square().sum() for part in x.split(3, 1))
        assert isinstance(loss, Tensor)
        return torch.autograd.grad(loss, [*block.parameters()])

    torch.testing.assert_close(gradients(compiled), gradients(block), rtol=1e-4, atol=1e-4)
