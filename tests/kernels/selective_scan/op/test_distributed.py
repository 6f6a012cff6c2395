"""A selective scan over ranks gives what one process gives over the whole sequence."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from distributed_operators import (
    Selective,
    selective,
    selective_failure,
    selective_outputs,
)
from rank_pool import RANKS, SIZES, RankPool

from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.op.arguments import Arguments, Options
from scan_registry.kernels.selective_scan.op.distributed import summed_sizes

#: Of every run: all that a number of ranks may be is met by whole sequences or by packed ones.
FEW = {(1, True), (2, False), (3, False), (3, True), (RANKS, True)}
GROUPS = [(1, 2), (4, 0), (0, 3), (6, 4)]


@pytest.mark.parametrize(
    ("size", "packed"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.thorough)
        for case in product(SIZES, (False, True))
    ],
)
def test_all_that_it_takes(ranks: RankPool, size: int, packed: bool) -> None:
    ranks.run(size, selective, Selective((1, 1), packed))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_groups_and_what_does_not_change_with_time(
    ranks: RankPool, groups: tuple[int, int], packed: bool
) -> None:
    ranks.run(3, selective, Selective(groups, packed, every=False))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_step_sizes_without_softplus(ranks: RankPool, groups: tuple[int, int]) -> None:
    ranks.run(3, selective, Selective(groups, every=False, softplus=False))


@pytest.mark.parametrize("groups", [(1, 1), (0, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_complex_numbers(ranks: RankPool, groups: tuple[int, int], packed: bool) -> None:
    ranks.run(3, selective, Selective(groups, packed, complex_numbers=True))


@pytest.mark.parametrize("complex_numbers", [False, True])
def test_one_packed_sequence(ranks: RankPool, complex_numbers: bool) -> None:
    """Its initial state has the form of a B that all channels share."""
    case = Selective((1, 1), packed=True, complex_numbers=complex_numbers, sequences=1)
    ranks.run(3, selective, case)


@pytest.mark.parametrize("chunks", [1, 4])
def test_outputs_can_be_changed_in_place(ranks: RankPool, chunks: int) -> None:
    ranks.run(2, selective_outputs, chunks)


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_rank_that_can_make_no_summary(ranks: RankPool, backward: bool, known: bool) -> None:
    *others, bad = ranks.run(3, selective_failure, backward, known)
    assert bad == ["MemoryError: no room", ""]
    for first, following in others:
        assert "rank 2: MemoryError: no room" in first
        assert following == ""


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_step_sizes_add_up(softplus: bool, biased: bool) -> None:
    torch.manual_seed(0)
    delta = torch.randn(3, 10, 50).bfloat16()
    bias = torch.randn(10) if biased else None
    arguments = Arguments(delta, delta, delta, delta, delta, None, None, bias, None, None)
    total = summed_sizes(arguments, Options(softplus))
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, reference.step_sizes(delta, bias, softplus).sum(-1))
