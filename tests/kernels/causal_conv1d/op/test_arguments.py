"""What ``causal_conv1d`` and its step refuse, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scan_registry import causal_conv1d, causal_conv1d_update
from scan_registry.compat import causal_conv1d as replacement

X, W = torch.randn(2, 3, 8), torch.randn(3, 4)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "short state": (
        lambda: causal_conv1d_update(X, torch.randn(2, 3, 2), W),
        ValueError,
        r"conv_state has shape \(2, 3, 2\)",
    ),
    "expanded state": (
        lambda: causal_conv1d_update(X, torch.randn(1, 3, 3).expand(2, 3, 3), W),
        ValueError,
        "conv_state is expanded",
    ),
    "state's dtype": (
        lambda: causal_conv1d_update(X, torch.randn(2, 3, 3).half(), W),
        TypeError,
        "conv_state has dtype float16, x float32",
    ),
    "positions": (
        lambda: causal_conv1d_update(X, torch.randn(2, 3, 3), W, None, None, torch.tensor([1])),
        ValueError,
        "cache_seqlens has shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        call()


def test_numbers_of_sequences_are_those_of_int32() -> None:
    """Of a larger one only a part would be read, which may be that of another sequence."""
    numbers = torch.zeros(2, 8, dtype=torch.int64)
    numbers[:, 4:] = 2**31 - 1
    expected = causal_conv1d(X, W, seq_idx=numbers.int())
    assert torch.equal(causal_conv1d(X, W, seq_idx=numbers), expected)
    numbers[1, 5:] = 2**32
    with pytest.raises(ValueError, match="seq_idx has the number 4294967296"):
        causal_conv1d(X, W, seq_idx=numbers)


def test_a_state_made_for_inference_is_not_changed_outside_of_it() -> None:
    x = torch.randn(2, 3)
    with torch.inference_mode():
        state = torch.randn(2, 3, 3)
        causal_conv1d_update(x, state, W)
        before = state.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"pass conv_state.clone\(\)"):
        causal_conv1d_update(x, state, W)
    assert torch.equal(state.clone(), before.clone())


def test_what_is_not_dense_is_refused_with_what_to_pass() -> None:
    x, weight = torch.rand(2, 3, 8), torch.rand(3, 4)
    jagged = torch.nested.nested_tensor([torch.rand(3, 8)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"x is in oneDNN's layout; .* pass x\.to_dense\(\)"):
        causal_conv1d(x.to_mkldnn(), weight)
    with pytest.raises(TypeError, match=r"x is jagged; .* pass x\.to_padded_tensor\(0\.0\)"):
        causal_conv1d(jagged, weight)
    with pytest.raises(TypeError, match=r"weight is sparse; .* pass weight\.to_dense\(\)"):
        causal_conv1d(x, weight.to_sparse())


def test_vmap_of_the_update_is_refused() -> None:
    state, x = torch.randn(5, 2, 3, 3), torch.randn(5, 2, 3)
    with pytest.raises(RuntimeError, match="causal_conv1d_update changes conv_state in place"):
        torch.vmap(lambda x, state: causal_conv1d_update(x, state, W))(x, state)


def test_updates_seen_before() -> None:
    x, state, weight = torch.randn(2, 3), torch.zeros(2, 3, 4), torch.randn(3, 4)
    inputs = []
    for _ in range(5):
        inputs.append(torch.randn_like(x))
        version = state._version
        y = causal_conv1d_update(inputs[-1], state, weight)
        assert state._version > version
    torch.testing.assert_close(y, causal_conv1d(torch.stack(inputs, -1), weight)[..., -1])
    with pytest.raises(ValueError, match="conv_state has shape"):
        causal_conv1d_update(x, state[..., :2], weight)
    with pytest.raises(TypeError, match="conv_state has dtype"):
        causal_conv1d_update(x, state.half(), weight)


def test_a_step_that_would_need_a_derivative_is_refused() -> None:
    """Before the state changes; the replacement of causal-conv1d records none, as the original."""
    x, state = torch.randn(2, 3), torch.randn(2, 3, 4)
    weight, before = torch.randn(3, 4, requires_grad=True), state.clone()
    with pytest.raises(RuntimeError, match="no derivative"):
        causal_conv1d_update(x, state, weight)
    assert torch.equal(state, before)
    with torch.no_grad():
        expected = causal_conv1d_update(x, state, weight)
    found = replacement.causal_conv1d_update(x, before, weight)
    assert torch.equal(found, expected)
    assert not found.requires_grad
