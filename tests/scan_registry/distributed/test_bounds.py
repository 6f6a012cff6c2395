"""The bounds of packed sequences: what is refused, and how ranks compare theirs."""

from __future__ import annotations

import pytest
import torch

from scan_registry.distributed.parts import compared, host_bounds


def test_bounds_that_differ_are_told_apart() -> None:
    """Also if they are many, and the same at the start."""
    many = tuple(range(0, 300, 3))
    others = (*many[:50], many[50] + 1, *many[51:])
    for one, other in (((0, 3, 12), (0, 2, 12)), (many, others)):
        digests, words = zip(*map(compared, (one, other)), strict=True)
        assert len({*digests}) == len({*words}) == 2


@pytest.mark.parametrize(
    ("bounds", "said"), [([1, 5], "begins with 1"), ([0, 9, 3, 15], "falls from 9 to 3 at index 2")]
)
def test_bounds_rise_from_zero(bounds: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=f"cu_seqlens {said}; it must rise from 0"):
        host_bounds(torch.tensor(bounds))
