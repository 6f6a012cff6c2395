"""What a call over ranks does on the CPU, once its shapes were agreed on: no read of a device's values, one all-gather where that
is enough, and few operators."""

from __future__ import annotations

import distributed_host_work as work
import pytest
from rank_pool import RankPool

#: The most operators of a rank that launch something, forward and backward, and all-gathers in each pass.
OPERATORS = {
    "reduce": (10, 13),
    "pass": (3, 4),
    "selective_scan": (3, 4),
    "selective_scan, reduce": (12, 14),
    "causal_conv1d": (15, 14),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_known_call_reads_nothing(ranks: RankPool, size: int, operator: str) -> None:
    for rank, passes in enumerate(ranks.run(size, work.steady, operator, False)):
        for (operators, exchanges, reads), most in zip(passes, OPERATORS[operator], strict=True):
            assert reads == []
            assert len(operators) <= most, operators
            gathers = [each for each in exchanges if "gather" in each]
            assert len(gathers) == 1, exchanges
            if operator in ("reduce", "selective_scan, reduce", "causal_conv1d"):
                assert exchanges == gathers
            elif 0 < rank < size - 1:
                assert {"send", "recv_"} <= set(exchanges), exchanges


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("operator", ["reduce", "selective_scan, reduce"])
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
