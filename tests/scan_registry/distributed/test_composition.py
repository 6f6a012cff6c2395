"""Scans over ranks under activation checkpointing, torch.compile, FSDP2 and tensor parallelism."""

from __future__ import annotations

import distributed_composed as composed
import pytest
from rank_pool import GROUP_TIMEOUT, RankPool


@pytest.mark.parametrize("scan", composed.SCANS)
def test_activation_checkpointing(ranks: RankPool, scan: str) -> None:
    ranks.run(2, composed.check_checkpointed, scan)


@pytest.mark.slow
@pytest.mark.parametrize("scan", composed.SCANS)
def test_compiled_around_a_scan(ranks: RankPool, scan: str) -> None:
    for said in ranks.run(2, composed.check_compiled, scan):
        assert said.startswith("Unsupported: ")


@pytest.mark.slow
@pytest.mark.parametrize("scan", composed.SCANS)
def test_compiled_after_a_call_under_a_mode(ranks: RankPool, scan: str) -> None:
    ranks.run(2, composed.check_given_up, scan, limit=GROUP_TIMEOUT / 2)


@pytest.mark.slow
def test_channels_within_parameters_and_time(ranks: RankPool) -> None:
    ranks.run(ranks.ranks, composed.check_time_and_channels)


@pytest.mark.thorough  # the scan's own part is in test_meshes_of_two_dimensions; torch lays its projections on the mesh for ten s
def test_dtensors_of_time_and_channels(ranks: RankPool) -> None:
    ranks.run(ranks.ranks, composed.check_dtensors_of_time_and_channels)
