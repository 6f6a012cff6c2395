"""Operators on DTensors: shards of batch and channels by themselves, shards of time together."""

from __future__ import annotations

import distributed_dtensors as dtensors
import distributed_models as models
import pytest
from rank_pool import RankPool

from scan_registry import distributed

SHARDED = sorted(dtensors.CALLS)
TIMED = [name for name in SHARDED if name.split(",")[0] in distributed.__all__]


@pytest.mark.parametrize("along", ["batch", "channels"])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_are_computed_without_communication(ranks: RankPool, name: str, along: str) -> None:
    ranks.run(2, dtensors.check_shards, name, along)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TIMED)
def test_shards_of_time(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(size, dtensors.check_time, name)


def test_shards_of_time_with_options(ranks: RankPool) -> None:
    ranks.run(2, dtensors.check_time_with_options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["linear_scan", "gated_scan", "selective_scan", "ssd_scan", "causal_conv1d"]
)
def test_meshes_of_two_dimensions(ranks: RankPool, name: str, thorough: bool) -> None:
    ranks.run(ranks.ranks, dtensors.check_two_dimensions, name, thorough, limit=120)


def test_shards_that_do_not_go_together(ranks: RankPool) -> None:
    ranks.run(2, dtensors.check_redistributed)


def test_uneven_shards(ranks: RankPool) -> None:
    ranks.run(4, dtensors.check_shards, "linear_scan", "channels")
    ranks.run(4, dtensors.check_shards, "causal_conv1d", "channels")


def test_tensors_that_are_no_dtensors(ranks: RankPool) -> None:
    said, _ = ranks.run(2, dtensors.check_plain_tensors)
    assert (
        "TypeError: causal_conv1d has DTensors among its arguments, and a torch.Tensor" in said[0]
    )
    assert "distribute_tensor" in said[1]
    assert "distribute_tensor" in said[2]
    assert said[3].startswith("TypeError: tokens must be a torch.Tensor")
    assert said[4].startswith("ValueError: weight has shape (2, 4)")


@pytest.mark.slow
def test_compiled(ranks: RankPool, thorough: bool) -> None:
    ranks.run(2, dtensors.check_compiled, thorough, limit=120)


@pytest.mark.slow
def test_fully_sharded_parameters(ranks: RankPool) -> None:
    ranks.run(2, models.check_fully_sharded, limit=120)


@pytest.mark.slow
def test_fully_sharded_parameters_and_time(ranks: RankPool) -> None:
    ranks.run(2, models.check_time_and_parameters)


def test_channels_by_tensor_parallelism(ranks: RankPool) -> None:
    ranks.run(2, models.check_tensor_parallel)
