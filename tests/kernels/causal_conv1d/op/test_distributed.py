"""Causal convolutions over ranks give what one process gives over the whole sequence."""

from __future__ import annotations

import pytest
from covering import rest_thorough
from distributed_convolutions import (
    check_all,
    check_checkpointed,
    check_narrow,
    check_second_derivative,
    refused,
)
from rank_pool import SIZES, USUAL_SIZES, RankPool

from scan_registry import distributed


@pytest.mark.parametrize("size", rest_thorough(SIZES, USUAL_SIZES))
def test_results_and_gradients_are_those_of_one_process(ranks: RankPool, size: int) -> None:
    assert ranks.run(size, check_all, limit=120) == [63 if size == 3 else 21] * size


@pytest.mark.parametrize("size", [1, 3])
def test_second_derivatives_are_those_of_one_process(ranks: RankPool, size: int) -> None:
    ranks.run(size, check_second_derivative)


def test_narrow_dtypes(ranks: RankPool) -> None:
    ranks.run(3, check_narrow)


@pytest.mark.slow
def test_checkpointed_and_compiled(ranks: RankPool) -> None:
    ranks.run(2, check_checkpointed)


@pytest.mark.parametrize(
    ("what", "on_the_last", "on_others"),
    [
        (
            "rank of x",
            "ValueError: x has shape",
            "RuntimeError: distributed.causal_conv1d was not run",
        ),
        ("dtype of x", "TypeError: x has dtype", "rank 1: TypeError: x has dtype int32"),
        (
            "unknown activation",
            "ValueError: activation is 'relu'",
            "rank 1: ValueError: activation",
        ),
        ("channels of x", "channels 2", "channels 2"),
        ("width", "width 3", "width 3"),
        ("activation", "silu True", "silu True"),
        ("final state", "return_final_state True", "return_final_state True"),
        ("gradient", "gradient of x True", "gradient of x True"),
        ("bounds", "cu_seqlens", "cu_seqlens"),
    ],
)
def test_what_is_bad_on_one_rank_is_an_error_on_all(
    ranks: RankPool, what: str, on_the_last: str, on_others: str
) -> None:
    first, last = ranks.run(2, refused, what)
    assert on_the_last in last
    assert on_others in first


def test_without_a_group() -> None:
    import torch

    with pytest.raises(RuntimeError, match="init_process_group"):
        distributed.causal_conv1d(torch.zeros(1, 1, 1), torch.zeros(1, 2))
