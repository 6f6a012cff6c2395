"""The functions of ``scan_registry.distributed`` take local tensors, and say so if they are given DTensors."""

from __future__ import annotations

import distributed_refusals as cases
import pytest
from rank_pool import GROUP_TIMEOUT, RankPool

from scan_registry import distributed


def test_every_function_is_tested() -> None:
    assert set(cases.ARGUMENTS) == set(distributed.__all__)


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
