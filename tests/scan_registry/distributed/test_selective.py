"""A selective scan over ranks gives what one process gives over the whole sequence."""

from __future__ import annotations

import distributed_operators as cases
import pytest
from rank_pool import SIZES, RankPool


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("packed", [False, True])
def test_all_that_it_takes(ranks: RankPool, size: int, packed: bool) -> None:
    ranks.run(size, cases.selective, (1, 1), packed, True)


@pytest.mark.parametrize("groups", [(1, 2), (4, 0), (0, 3), (6, 4)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_groups_and_what_does_not_change_with_time(
    ranks: RankPool, groups: tuple[int, int], packed: bool
) -> None:
    ranks.run(3, cases.selective, groups, packed, False)
