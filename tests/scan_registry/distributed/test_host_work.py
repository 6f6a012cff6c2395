"""What a call over ranks does on the CPU, once its shapes were agreed on: no read of a device's values, one all-gather where that
is enough, and few operators."""

from __future__ import annotations

import distributed_host_work as work
import pytest
from rank_pool import RankPool

#: The most operators of a rank that launch something, forward and backward, and all-gathers in each pass.
OPERATORS = {
    "linear_scan": (10, 13),
    "selective_scan": (12, 14),
    "causal_conv1d": (15, 14),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_known_call_reads_nothing(ranks: RankPool, size: int, operator: str) -> None:
    for passes in ranks.run(size, work.steady, operator, False):
        for (operators, exchanges, reads), most in zip(passes, OPERATORS[operator], strict=True):
            assert reads == []
            assert len(operators) <= most, operators
            assert len(exchanges) == 1, exchanges
            assert "gather" in exchanges[0]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("operator", ["linear_scan", "selective_scan"])
def test_final_states_need_no_exchange_of_their_own(
    ranks: RankPool, size: int, operator: str
) -> None:
    for passes in ranks.run(size, work.steady, operator, True):
        for _, exchanges, reads in passes:
            assert reads == []
            assert len(exchanges) == 1


def test_a_first_call_reads(ranks: RankPool) -> None:
    """So the count of reads is not empty for want of counting."""
    assert all(ranks.run(2, work.first))
