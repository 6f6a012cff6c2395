"""Scans with states, in reverse, packed and with other gates, from their tensors to the launch: against the other road."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from graphs import recorded
from torch import Tensor

from scan_registry import linear_scan
from scan_registry.kernels.linear_scan.op import autograd as derivatives

pytestmark = pytest.mark.gpu

BATCH, TIME, CHANNELS = 3, 200, 64
WAYS = [*product((False, True), repeat=4)]


def draw(dim: int, gates: str, with_state: bool, packed: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    shape = [BATCH, TIME, CHANNELS] if dim == 1 else [BATCH, CHANNELS, TIME]
    of_gates = {"channel": [CHANNELS] if dim == 1 else [CHANNELS, 1]}.get(gates, shape)
    dtype = torch.bfloat16 if gates == "wider" else torch.float32
    bounds = torch.tensor([0, 70, 70, 199, TIME], device="cuda") if packed else None
    of_state = [*shape]
    of_state[dim] = 4
    if not packed:
        del of_state[dim]
    return (
        torch.rand(of_gates, device="cuda").requires_grad_(),
        torch.randn(shape, device="cuda").to(dtype).requires_grad_(),
        torch.randn(of_state, device="cuda").requires_grad_() if with_state else None,
        bounds,
    )


def results(tensors: tuple[Any, ...], **options: Any) -> list[Tensor]:
    gates, tokens, state, bounds = tensors
    found = linear_scan(gates, tokens, state, cu_seqlens=bounds, **options)
    outputs = [found] if isinstance(found, Tensor) else [*found]
    torch.manual_seed(1)
    weights = [torch.randn_like(out) for out in outputs]
    wanted = [each for each in tensors[:3] if each is not None]
    return [*outputs, *torch.autograd.grad(outputs, wanted, weights)]


@pytest.mark.parametrize("gates", ["full", "channel", "wider"])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(("with_state", "final", "reverse", "packed"), WAYS)
def test_both_roads_agree(
    with_state: bool, final: bool, reverse: bool, packed: bool, dim: int, gates: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tensors = draw(dim, gates, with_state, packed)
    options = {"dim": dim, "reverse": reverse, "return_final_state": final}
    short: list[Any] = []

    def noted(*given: Any) -> Any:
        found = derivatives.fast_scan(*given)
        short.append(found)
        return found

    monkeypatch.setattr("scan_registry.kernels.linear_scan.op.function.fast_scan", noted)
    found = [results(tensors, **options) for _ in range(2)]
    assert all(each is not None for each in short)
    monkeypatch.setattr("scan_registry.kernels.linear_scan.op.function.fast_scan", lambda *_: None)
    expected = results(tensors, **options)
    slack = 2e-2 if gates == "wider" else 1e-4
    for each in found:
        for one, other in zip(each, expected, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )
            torch.testing.assert_close(one, other, rtol=slack, atol=slack)


def test_bounds_of_32_bits_and_states_that_are_converted() -> None:
    """They go the other road, and come to the same."""
    gates, tokens, state, bounds = draw(1, "full", True, True)
    expected = results((gates, tokens, state, bounds), dim=1)
    for other in (
        (gates, tokens, state, bounds.int()),
        (gates, tokens, state.expand(BATCH, 4, CHANNELS), bounds),
    ):
        for one, two in zip(results(other, dim=1), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_in_a_graph() -> None:
    gates, tokens, state, _ = draw(1, "full", True, False)
    gates, tokens, state = (each.detach() for each in (gates, tokens, state))
    linear_scan(gates, tokens, state, dim=1, return_final_state=True)
    torch.cuda.synchronize()
    graph, found = recorded(
        lambda: linear_scan(gates, tokens, state, dim=1, return_final_state=True), warm_ups=0
    )
    state.mul_(3)
    graph.replay()
    for one, other in zip(
        found, linear_scan(gates, tokens, state, dim=1, return_final_state=True), strict=True
    ):
        torch.testing.assert_close(one, other)
