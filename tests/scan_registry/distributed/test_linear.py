"""A scan over ranks gives what one process gives over the whole sequence."""

from __future__ import annotations

import pytest
from distributed_cases import Case, compare, draw_cases
from rank_pool import SIZES, RankPool


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("schedule", ["reduce", "pass"])
def test_simple(ranks: RankPool, size: int, schedule: str) -> None:
    ranks.run(size, compare, Case((2, 5), (4, 3, 6), schedule=schedule))


@pytest.mark.parametrize("size", SIZES)
def test_drawn(ranks: RankPool, size: int) -> None:
    ranks.run(size, compare, *draw_cases(60, size))
