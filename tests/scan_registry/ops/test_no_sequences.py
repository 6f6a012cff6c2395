"""Packed sequences of which there are none: ``cu_seqlens`` is [0], and time has no step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, randn

import scan_registry as sr

#: Each with inputs of no step, and what calls the function with them: the output, and the final state of no sequence.
CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any], tuple[int, ...]]] = {
    "linear_scan": (((1, 4, 0), (1, 4, 0)), sr.linear_scan, (1, 4, 0)),
    "min_gru": (((1, 4, 0), (1, 4, 0)), sr.min_gru, (1, 4, 0)),
    "rg_lru": (((1, 4, 0), (1, 4, 0), (1, 4, 0), (4,)), sr.rg_lru, (1, 4, 0)),
    "selective_scan": (
        ((1, 4, 0), (1, 4, 0), (4, 3), (1, 3, 0), (1, 3, 0)),
        sr.selective_scan,
        (1, 0, 4, 3),
    ),
    "ssd_scan": (
        ((1, 0, 2, 8), (1, 0, 2), (2,), (1, 0, 1, 8), (1, 0, 1, 8)),
        sr.ssd_scan,
        (1, 0, 2, 8, 8),
    ),
    "causal_conv1d": (((1, 4, 0), (4, 3)), sr.causal_conv1d, (0, 4, 2)),
}
BOUNDS = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_there_may_be_no_sequence_where_there_is_no_step(name: str, backend: str) -> None:
    shapes, function, state = CALLS[name]
    inputs = [randn(shape, requires_grad=True) for shape in shapes]
    out, final = function(*inputs, cu_seqlens=BOUNDS, return_final_state=True, backend=backend)
    assert (tuple(out.shape), tuple(final.shape)) == (shapes[0], state)
    gradients = torch.autograd.grad([out.sum(), final.sum()], inputs)
    assert not any(bool(grad.any()) for grad in gradients)


def test_a_network_of_no_sequences() -> None:
    inputs = [
        randn(shape, requires_grad=True) for shape in ((1, 0, 4, 2, 8), (4, 2, 8, 8), (4, 2, 8))
    ]
    h, last = sr.rnn(*inputs, function="lstm", cu_seqlens=BOUNDS)
    assert h.shape == (2, 1, 0, 2, 8)
    assert last.shape == (2, 1, 0, 2, 8)
    torch.autograd.grad(h.sum() + last.sum(), inputs)


def test_steps_of_no_sequences() -> None:
    state: Tensor = torch.ones(2, 4, 3)
    tensors = randn(0, 4), randn(0, 4), randn(4, 3), randn(0, 3), randn(0, 3)
    assert sr.selective_state_update(state, *tensors, cu_seqlens=BOUNDS).shape == (0, 4)
    assert bool((state == 1).all())
    y = sr.causal_conv1d_update(randn(0, 4), randn(0, 4, 3), randn(4, 3), cu_seqlens=BOUNDS)
    assert y.shape == (0, 4)


def test_steps_need_a_sequence() -> None:
    with pytest.raises(ValueError, match=r"\(sequences \+ 1,\), with one sequence at least"):
        sr.linear_scan(randn(1, 4, 3), randn(1, 4, 3), cu_seqlens=BOUNDS)


def test_blocks_of_no_sequences() -> None:
    block, x = sr.nn.Mamba2(16, d_state=8, headdim=8), randn(1, 0, 16)
    assert block(x, cu_seqlens=BOUNDS).shape == x.shape
    states = block.allocate_inference_cache(0, 0)
    assert block(x, cu_seqlens=BOUNDS, states=states).shape == x.shape
