"""A gated scan over ranks gives what one process gives over the whole sequence."""

from __future__ import annotations

import distributed_operators as cases
import pytest
from rank_pool import RANKS, RankPool

from scan_registry.kernels.gated_scan.kinds import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(ranks: RankPool, kind: str) -> None:
    ranks.run(3, cases.gated, kind, -1, False)


@pytest.mark.parametrize("size", [1, 2, RANKS])
@pytest.mark.parametrize("packed", [False, True])
def test_channels_last(ranks: RankPool, size: int, packed: bool) -> None:
    ranks.run(size, cases.gated, "rg_lru", 1, packed)
