"""Bounds of packed sequences on their way to kernels that trust them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scan_registry.ops import plans

TIME = 1000
ANY = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-5, TIME + 5))


def received(values: list[int]) -> list[int]:
    """What the kernel gets."""
    found: list[dict[str, torch.Tensor | None]] = []
    tokens = torch.zeros(1)
    run = plans._within(lambda tensors: found.append({**tensors}), TIME)
    run({"tokens": tokens, "offsets": torch.tensor(values)})
    (tensors,) = found
    assert tensors["tokens"] is tokens
    bounds = tensors["offsets"]
    assert bounds is not None
    assert (bounds.dtype, bounds.is_contiguous()) == (torch.int64, True)
    return [int(bound) for bound in bounds]


@given(st.lists(ANY, min_size=2, max_size=20))
def test_whatever_is_given_they_are_within_time(values: list[int]) -> None:
    bounds = received(values)
    assert len(bounds) == len(values)
    assert all(0 <= bound <= TIME for bound in bounds)


@pytest.mark.parametrize("values", [[0, TIME], [0, 0, 3, 3, 700, TIME]], ids=str)
def test_sound_ones_stay_as_they_are(values: list[int]) -> None:
    assert received(values) == values
