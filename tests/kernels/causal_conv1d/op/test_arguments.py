"""What ``causal_conv1d`` and its step refuse, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import StepTests

from scan_registry import causal_conv1d, causal_conv1d_update
from scan_registry.compat import causal_conv1d as replacement

X, W = torch.randn(2, 3, 8), torch.randn(3, 4)


class TestUpdate(StepTests):
    name, state, learned = "causal_conv1d_update", "conv_state", "weight"

    def draw(self) -> dict[str, Any]:
        return {"x": torch.randn(2, 3), "conv_state": torch.randn(2, 3, 3), "weight": W.clone()}

    def run(self, **arguments: Any) -> torch.Tensor:
        return causal_conv1d_update(**arguments)

    refused = {
        "short state": (
            {"conv_state": torch.randn(2, 3, 2)},
            ValueError,
            r"conv_state has shape \(2, 3, 2\)",
        ),
        "expanded state": (
            {"conv_state": torch.randn(1, 3, 3).expand(2, 3, 3)},
            ValueError,
            "conv_state is expanded",
        ),
        "state's dtype": (
            {"conv_state": torch.randn(2, 3, 3).half()},
            TypeError,
            "conv_state has dtype float16, x float32",
        ),
        "positions": ({"cache_seqlens": torch.tensor([1])}, ValueError, "cache_seqlens has shape"),
    }


def test_numbers_of_sequences_are_those_of_int32() -> None:
    """Of a larger one only a part would be read, which may be that of another sequence."""
    numbers = torch.zeros(2, 8, dtype=torch.int64)
    numbers[:, 4:] = 2**31 - 1
    expected = causal_conv1d(X, W, seq_idx=numbers.int())
    assert torch.equal(causal_conv1d(X, W, seq_idx=numbers), expected)
    numbers[1, 5:] = 2**32
    with pytest.raises(ValueError, match="seq_idx has the number 4294967296"):
        causal_conv1d(X, W, seq_idx=numbers)


def test_what_is_not_dense_is_refused_with_what_to_pass() -> None:
    x, weight = torch.rand(2, 3, 8), torch.rand(3, 4)
    jagged = torch.nested.nested_tensor([torch.rand(3, 8)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"x is in oneDNN's layout; .* pass x\.to_dense\(\)"):
        causal_conv1d(x.to_mkldnn(), weight)
    with pytest.raises(TypeError, match=r"x is jagged; .* pass x\.to_padded_tensor\(0\.0\)"):
        causal_conv1d(jagged, weight)
    with pytest.raises(TypeError, match=r"weight is sparse; .* pass weight\.to_dense\(\)"):
        causal_conv1d(x, weight.to_sparse())


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


def test_the_replacement_of_causal_conv1d_records_no_derivative() -> None:
    """As the original."""
    x, state = torch.randn(2, 3), torch.randn(2, 3, 4)
    expected = causal_conv1d_update(x, state.clone(), W)
    result = replacement.causal_conv1d_update(x, state, W.clone().requires_grad_())
    assert torch.equal(result, expected)
    assert not result.requires_grad
