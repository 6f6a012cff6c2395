"""Ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
