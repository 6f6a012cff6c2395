"""The functions of ``scan_registry.distributed`` take local tensors, and say so if they are given DTensors."""

from __future__ import annotations

import distributed_refusals as cases
import pytest
import torch
from rank_pool import GROUP_TIMEOUT, RankPool

from scan_registry import distributed


def test_every_function_is_tested() -> None:
    others = {"cost", "machines", "measure"}  # these take no tensors
    assert set(cases.ARGUMENTS) == set(distributed.__all__) - others


def _check(said: dict[str, str], function: str) -> None:
    for name, words in said.items():
        assert words.startswith(f"TypeError: {name} is a DTensor with placements (")
        assert f"distributed.{function} takes local tensors" in words
        assert f"{name}.to_local()" in words


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("function", cases.ARGUMENTS)
def test_dtensors_are_refused(ranks: RankPool, function: str, size: int) -> None:
    for said in ranks.run(size, cases.refused, function, False, limit=GROUP_TIMEOUT / 2):
        assert list(said) == list(cases.ARGUMENTS[function])
        _check(said, function)


@pytest.mark.slow
@pytest.mark.parametrize("function", cases.ARGUMENTS)
def test_dtensors_are_refused_in_compiled_calls(ranks: RankPool, function: str) -> None:
    for said in ranks.run(2, cases.refused, function, True, limit=GROUP_TIMEOUT / 2):
        _check(said, function)


@pytest.mark.parametrize("function", sorted({*cases.ARGUMENTS} - {"scan_summary"}))
def test_a_dtensor_on_one_rank(ranks: RankPool, function: str) -> None:
    """``scan_summary`` is left out: its ranks do not communicate."""
    first, last = ranks.run(2, cases.refused_on_one, function, limit=GROUP_TIMEOUT / 2)
    _check({cases.ARGUMENTS[function][0]: last}, function)
    assert first.startswith("RuntimeError: ")
    assert "was not run" in first
    assert "rank 1: TypeError: " in first
    assert "to_local()" in first


def test_devices_that_are_measured(ranks: RankPool) -> None:
    first, last = ranks.run(2, cases.measured)
    assert first[:3] == last[:3] == ["2 ranks on the CPU, 2 on a host"] * 3
    assert last[3] == last[6] == "ValueError: device is 'meta'; accepted are cpu and cuda"
    assert last[4].startswith("TypeError: device is 3; it must be a torch.device, a string")
    assert last[5].startswith("RuntimeError: ")
    assert first[6].startswith("RuntimeError: ")
    assert "rank 1: ValueError: device is 'meta'" in first[6]
    if not torch.cuda.is_available():
        assert last[7] == "ValueError: device is 'cuda', and torch finds no GPU; accepted is cpu"
