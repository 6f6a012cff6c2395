"""What ``causal_conv1d`` and its step refuse, on the CPU."""

from __future__ import annotations

import pytest
import torch

from scan_registry import causal_conv1d, causal_conv1d_update

X, W = torch.randn(2, 3, 8), torch.randn(3, 4)


def test_numbers_of_sequences_are_those_of_int32() -> None:
    """Of a larger one only a part would be read, which may be that of another sequence."""
    numbers = torch.zeros(2, 8, dtype=torch.int64)
    numbers[:, 4:] = 2**31 - 1
    expected = causal_conv1d(X, W, seq_idx=numbers.int())
    assert torch.equal(causal_conv1d(X, W, seq_idx=numbers), expected)
    numbers[1, 5:] = 2**32
    with pytest.raises(ValueError, match="seq_idx has the number 4294967296"):
        causal_conv1d(X, W, seq_idx=numbers)


def test_vmap_of_the_update_is_refused() -> None:
    state, x = torch.randn(5, 2, 3, 3), torch.randn(5, 2, 3)
    with pytest.raises(RuntimeError, match="causal_conv1d_update changes conv_state in place"):
        torch.vmap(lambda x, state: causal_conv1d_update(x, state, W))(x, state)
