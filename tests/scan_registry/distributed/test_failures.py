"""What is wrong on one rank is an error on all of them, at once, and the next call is a good one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import distributed_failures as cases
import pytest
import torch
from rank_pool import RankPool

from scan_registry import distributed

SIZE = 3
#: Of the rank that is wrong, and of the others: the exception, and what it says.
OWN = {
    "mismatch": ("ValueError", "they must broadcast"),
    "no tensor": ("TypeError", "tokens must be a torch.Tensor, not NoneType"),
    "option": ("ValueError", "backend is 'quick'"),
}
DIFFERENT = {
    "shape": ("shape (2, T)", "shape (3, T)"),
    "dtype": ("tokens float32", "tokens bfloat16"),
    "initial_state": ("initial_state given", "initial_state None"),
    "reverse": ("reverse False", "reverse True"),
    "cu_seqlens": ("cu_seqlens [0, 3, 12]", "cu_seqlens [0, 2, 12]"),
    "no_grad": ("gradients recorded", "gradients not recorded"),
}


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("kind", OWN)
def test_a_rank_refuses_its_arguments(ranks: RankPool, kind: str, known: bool) -> None:
    *others, bad = ranks.run(SIZE, cases.failure, kind, known)
    exception, words = OWN[kind]
    assert bad[0] == exception
    assert words in bad[1]
    for name, message in others:
        assert name == "RuntimeError"
        assert f"rank 2: {exception}: " in message
        assert words in message


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_differ(ranks: RankPool, kind: str, known: bool) -> None:
    found = ranks.run(SIZE, cases.failure, kind, known)
    most, one = DIFFERENT[kind]
    for name, message in found:
        assert name == "ValueError", message
        assert "ranks 0, 1: linear_scan" in message
        assert most in message
        assert one in message.partition("rank 2: ")[2]


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("operator", ["linear_scan", "selective_scan", "causal_conv1d"])
def test_a_rank_without_memory(ranks: RankPool, operator: str, backward: bool, known: bool) -> None:
    *others, bad = ranks.run(SIZE, cases.without_memory, operator, backward, known)
    assert bad == ["OutOfMemoryError: no room", ""]
    for first, following in others:
        assert "rank 2: OutOfMemoryError: no room" in first
        assert following == ""


@pytest.mark.parametrize("scale", [1, 4000], ids=["small", "large"])
def test_headers_that_are_not_read(ranks: RankPool, scale: int) -> None:
    """As over NCCL: results that depend on other ranks are NaN, the next call is an error on all ranks, and the one after it good."""
    for rank, (nans, errors) in enumerate(ranks.run(SIZE, cases.unread, scale)):
        assert nans == [rank > 0, False]
        first, second, third = errors
        assert (first, third) == ("", "")
        assert second.startswith("ValueError: linear_scan was not run")
        assert f"ranks 0, 1: linear_scan: shape ({2 * scale}, T)" in second
        assert f"rank 2: linear_scan: shape ({3 * scale}, T)" in second


def test_ranks_learn_of_an_error_in_different_calls(ranks: RankPool) -> None:
    for errors in ranks.run(SIZE, cases.late):
        assert any(errors[:5])
        assert not any(errors[8:]), errors


def test_bounds_that_end_elsewhere(ranks: RankPool) -> None:
    for name, message in ranks.run(SIZE, cases.failure, "total", False):
        assert name == "ValueError"
        assert "cu_seqlens ends with 13; the ranks have [4, 4, 4] steps, 12 together" in message


def test_backward_passes_in_different_orders(ranks: RankPool) -> None:
    for message in ranks.run(SIZE, cases.different_backward):
        assert "backward pass" in message
        assert "rank 0: " in message
        assert "ranks 1, 2: " in message


def test_a_rank_that_dies_ends_the_others_call(tmp_path: Path) -> None:
    pool = RankPool(tmp_path, 3)
    try:
        *others, _ = pool.run(3, cases.killed, dies=2)
    finally:
        pool.close()
    assert all(others)


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_rank_that_is_killed_in_its_backward_pass(tmp_path: Path, early: bool) -> None:
    pool = RankPool(tmp_path, 3)
    try:
        first, _, last = pool.run(3, cases.killed_in_backward, early, dies=1)
    finally:
        pool.close()
    for message in (first, last):
        assert "Connection" in message  # and not "Timed out"


@pytest.mark.slow
def test_a_rank_that_makes_no_call(tmp_path: Path) -> None:
    """Before a forward pass or a backward one, or by calling with another group: all three at once, as they mostly wait."""
    timeout = 6  # a busy machine takes seconds to start the ranks
    with ExitStack() as stack:
        pools = {}
        for how in ("forward", "backward", "group"):
            (tmp_path / how).mkdir()
            pools[how] = RankPool(tmp_path / how, 3, timeout)
            stack.callback(pools[how].close)
            pools[how].start()
        threads = stack.enter_context(ThreadPoolExecutor(len(pools)))
        under_way = {
            how: threads.submit(pool.run, 3, cases.absent, how, timeout)
            for how, pool in pools.items()
        }
        said = {how: future.result() for how, future in under_way.items()}
    for how, (*others, last) in said.items():
        for message in others if how != "group" else (*others, last):
            assert "Timed out" in message, how


def test_dtypes_and_biases_that_differ(ranks: RankPool) -> None:
    for of_scan, of_convolution in ranks.run(SIZE, cases.of_another_dtype):
        assert "ranks 0, 1: gated_scan rg_lru of float32: " in of_scan
        assert "rank 2: gated_scan rg_lru of float16: " in of_scan
        assert "bias False" in of_convolution
        assert "bias True" in of_convolution


def test_groups_of_all_kinds(ranks: RankPool) -> None:
    for said in ranks.run(SIZE, cases.groups_of_all_kinds):
        of_namespace, of_number, of_stranger = said
        assert of_namespace.startswith("TypeError: group is a SimpleNamespace; accepted are")
        assert of_number.startswith("TypeError: group is a int")
        assert of_stranger == "ValueError: this process is not a member of the group"


def test_without_a_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        distributed.linear_scan(torch.rand(3), torch.rand(3))
