"""A scan over ranks gives what one process gives over the whole sequence."""

from __future__ import annotations

import distributed_cases as cases
import pytest
from covering import rest_thorough
from distributed_cases import Case, compare, draw_cases
from rank_pool import RANKS, SIZES, USUAL_SIZES, RankPool

UNEVEN, EMPTY = (4, 3, 6), (0, 5, 0, 0, 2, 1, 0)
#: Cases that are drawn: most for the fewest ranks of which one is between others.
DRAWN = {1: 15, 2: 30, 3: 60, 4: 20, 5: 20, 7: 20}
#: With this seed the cases hold what ``test_drawn_cases_hold_what_matters`` asks for.
SEED = 7140


@pytest.mark.parametrize("size", rest_thorough(SIZES, USUAL_SIZES))
def test_uneven_and_empty_parts(ranks: RankPool, size: int) -> None:
    ranks.run(
        size,
        compare,
        *(
            Case((2, 9), lengths, dim, reverse, initial=True, final=True)
            for lengths in (UNEVEN, EMPTY, (0,))
            for dim in (1, -1)
            for reverse in (False, True)
        ),
    )


@pytest.mark.parametrize("size", [1, 3])
def test_no_channels_or_no_batches(ranks: RankPool, size: int) -> None:
    ranks.run(
        size,
        compare,
        *(
            Case(shape, UNEVEN, dim, initial=True, final=True, bounds=bounds)
            for shape, dim in (((2, 0), 1), ((2, 0), -1), ((0, 9), 1))
            for bounds in (None, (0.5,))
        ),
    )


@pytest.mark.parametrize("size", rest_thorough(SIZES, USUAL_SIZES))
def test_sequences_that_cross_ranks(ranks: RankPool, size: int) -> None:
    """Borders in the midst of parts, at the borders of ranks (there are 12 steps for three of them), and empty sequences."""
    ranks.run(
        size,
        compare,
        *(
            Case((9,), (4, 3, 5), dim, reverse, True, True, bounds)
            for bounds in ((), (0.1, 0.9), (4 / 12, 4 / 12, 7 / 12), (0, 0.5, 0.5, 1))
            for dim, reverse in ((0, False), (-1, True))
        ),
    )


@pytest.mark.parametrize("size", rest_thorough(DRAWN, USUAL_SIZES))
def test_drawn(ranks: RankPool, size: int) -> None:
    ranks.run(size, compare, *draw_cases(DRAWN[size], SEED + size))


@pytest.mark.parametrize("size", [1, 3, RANKS])
def test_second_derivatives(ranks: RankPool, size: int) -> None:
    ranks.run(
        size,
        cases.second_derivatives,
        Case((2, 3), (2, 0, 3)),
        Case((3,), EMPTY, reverse=True, initial=True, final=True),
        Case((3,), (2, 3, 1), 0, initial=True, final=True, bounds=(0.2, 0.2, 0.5)),
        Case((3,), (2, 3, 1), reverse=True, final=True, bounds=(0.5, 0.7)),
        Case((2, 3), (2, 3), 1, reverse=True, initial=True, final=True, reset=True),
        Case((3,), (2, 3, 1), 0, initial=True, final=True, bounds=(0.2, 0.5), reset=True),
    )


@pytest.mark.parametrize("size", [2, 3])
def test_activation_checkpointing(ranks: RankPool, size: int) -> None:
    ranks.run(size, cases.checkpointed)


def test_two_calls_in_flight(ranks: RankPool) -> None:
    ranks.run(3, cases.two_in_flight)


def test_gradients_of_some_ranks_only(ranks: RankPool) -> None:
    ranks.run(3, cases.some_gradients)


def test_inference_mode_leaves_no_traces(ranks: RankPool) -> None:
    ranks.run(3, cases.modes)


def test_drawn_cases_hold_what_matters() -> None:
    drawn = [case for size in SIZES for case in draw_cases(DRAWN[size], SEED + size)]
    for has in (
        lambda case: 0 in case.lengths,
        lambda case: case.bounds and case.reverse and case.gates,
        lambda case: case.bounds and case.final and case.initial,
        lambda case: case.reset and case.bounds and case.gates and case.dim % 3 == 1,
        lambda case: case.reset and case.dim == 0 and case.shape and case.dtype == "complex128",
        lambda case: len(case.shape) == 0 and case.reset,
    ):
        assert sum(bool(has(case)) for case in drawn) >= 5
