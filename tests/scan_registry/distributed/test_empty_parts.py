"""A rank's part of time may have no steps, with and without packed sequences: results and derivatives are those of one process."""

from __future__ import annotations

import distributed_empty_parts as cases
import pytest
from rank_pool import RankPool

from scan_registry import distributed

#: Functions of ``distributed`` that cut no time.
OTHERS = {"scan_summary"}


def test_every_operator_is_tested() -> None:
    assert {*distributed.__all__} - OTHERS == {*cases.OPERATORS}


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", cases.OPERATORS)
def test_parts_without_steps(ranks: RankPool, name: str, packed: bool, thorough: bool) -> None:
    ranks.run(3, cases.check, name, packed, thorough)
