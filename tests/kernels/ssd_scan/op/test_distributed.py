"""Mamba-2's scan over ranks gives what one process gives over the whole sequence."""

from __future__ import annotations

from typing import Any

import distributed_ssd as dual
import pytest
import torch
from covering import rest_thorough
from distributed_ssd import Case
from rank_pool import SIZES, USUAL_SIZES, RankPool


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("size", rest_thorough(SIZES, USUAL_SIZES))
def test_all_that_it_takes(ranks: RankPool, size: int, packed: bool) -> None:
    ranks.run(size, dual.compare, Case(packed=packed))


@pytest.mark.parametrize(
    "without", [("D",), ("z",), ("dt_bias",), ("initial_state",), ("D", "z", "dt_bias", "initial_state")], ids=str
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_what_may_be_left_out(ranks: RankPool, packed: bool, without: tuple[str, ...]) -> None:
    ranks.run(3, dual.compare, Case(packed=packed, without=without))


@pytest.mark.parametrize(
    "lengths", [(0, 4, 8), (5, 0, 0), (0, 0, 4), (0, 0, 0), (70, 1, 9)], ids=str
)
def test_parts_of_any_lengths(ranks: RankPool, lengths: tuple[int, ...]) -> None:
    ranks.run(3, dual.compare, Case(lengths))


@pytest.mark.parametrize(
    "options", [{"dt_softplus": True}, {"dt_limit": (0.2, 0.9)}, {"chunk_size": 2}], ids=str
)
def test_options(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks.run(3, dual.compare, Case(options=options))


def test_a_number_of_D_for_each_element_of_a_head(ranks: RankPool) -> None:
    ranks.run(3, dual.compare, Case(wide_D=True))


def test_float32(ranks: RankPool) -> None:
    ranks.run(3, dual.compare, Case(dtype="float32"))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": 1.0}, "TypeError", "x must be a torch.Tensor, not float"),
        (
            {"initial_state": torch.zeros(2, 4, 5, 3, dtype=torch.float64)},
            "ValueError",
            "be (2, 4, 3, 5)",
        ),
        ({"cu_seqlens": [0, 20]}, "TypeError", "cu_seqlens must be a torch.Tensor, not list"),
        ({"dt_limit": (1.0, 0.1)}, "ValueError", "dt_limit is (1.0, 0.1)"),
    ],
)
def test_arguments_that_one_rank_refuses(
    ranks: RankPool, changes: dict[str, Any], error: str, words: str
) -> None:
    (first, following), (bad, again) = ranks.run(2, dual.refused, changes)
    assert bad.startswith(error)
    assert words in bad
    assert "rank 1" in first
    assert following == again == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"dt_limit": (0.0, 1.0)}, "dt_limit (0.0, 1.0)"), ({"dt_softplus": True}, "dt_softplus True"), ({"D": None}, "with z dt_bias"),
     ({"z": None}, "with D dt_bias"), ({"return_final_state": True}, "return_final_state True")],
)  # fmt: skip
def test_ranks_that_do_not_agree(ranks: RankPool, changes: dict[str, Any], words: str) -> None:
    for said, following in ranks.run(2, dual.refused, changes):
        assert said.startswith("ValueError: ssd_scan was not run")
        assert words in said
        assert following == ""


def test_second_derivatives_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(2, dual.differentiated_twice):
        assert said.startswith("RuntimeError: ssd_scan over ranks has first derivatives only")


def test_outputs_can_be_changed_in_place(ranks: RankPool) -> None:
    ranks.run(2, dual.changed_in_place)
