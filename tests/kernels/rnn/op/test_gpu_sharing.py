"""What networks that run step by step share on a GPU: buffers and graphs, among threads and modules."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import captured
from torch import Tensor

import scan_registry
from scan_registry import nn
from scan_registry.kernels.rnn.op.buffers import StepBuffers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

MEGABYTE = 1 << 20
#: What cuBLAS works in, which torch keeps for each thread's handle and each stream.
WORKSPACES = 64 * MEGABYTE


def states_and_gradient(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    out = module(leaf)[0]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [leaf])]


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(work, range(count))]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "SLSTM"])
def test_threads_on_one_stream_do_not_share_buffers(kind: str) -> None:
    """As a server does: one network, and an input of its own in each thread."""
    module = getattr(nn, kind)(32, 1024, device="cuda").requires_grad_(False)
    inputs = [torch.randn(130, 2, 32, device="cuda") for _ in range(3)]
    expected = [states_and_gradient(module, x) for x in inputs]

    def work(number: int) -> bool:
        return all(
            torch.equal(out, right)
            for _ in range(20)
            for out, right in zip(
                states_and_gradient(module, inputs[number]), expected[number], strict=True
            )
        )

    assert in_threads(3, work) == [True] * 3


#: Own networks in three threads, each for the first time in the process.
FIRST_CALLS = """
import threading, torch
from scan_registry import nn
torch.manual_seed(0)
modules = [nn.LSTM(32, 1024, device="cuda") for _ in range(3)]
x = torch.randn(200, 2, 32, device="cuda")
start, outs, errors = threading.Barrier(3), [None] * 3, []
def work(number):
    try:
        start.wait()
        for _ in range(4):
            outs[number] = modules[number](x)[0]
            outs[number].sum().backward()
            modules[number].zero_grad()
            torch.randn(10, device="cuda").cpu()
            torch.cuda.current_stream().synchronize()
    except Exception as error:
        errors.append(repr(error))
threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
for module, out in zip(modules, outs):
    assert torch.equal(module(x)[0], out)
"""


def test_threads_may_run_their_networks_for_the_first_time_together(tmp_path: Path) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", FIRST_CALLS]
        run = captured(command, cwd=tmp_path)
        assert run.returncode == 0, run.stderr


def test_a_first_run_and_another_threads_graph_do_not_work_in_the_same_memory() -> None:
    """Where the product with R is split, cuBLAS keeps sums in memory that torch has for each thread and
    stream. Graphs that a thread recorded refer to that memory, and other threads launch them."""
    weight, links = torch.randn(1, 1024, 1024, device="cuda") / 32, 512

    def buffers() -> StepBuffers:
        return StepBuffers({"states": torch.randn(links + 1, 1, 3, 1024, device="cuda")}, links)

    def products(states: Tensor) -> None:
        for before, after in pairwise(states):
            torch.bmm(before, weight, out=after)

    def body(tensors: dict[str, Tensor], steps: int) -> None:
        products(tensors["states"])

    recorded, stream = buffers(), torch.cuda.current_stream()
    expected = recorded.tensors["states"].clone()
    products(expected)
    recorded.run(links, body)
    recorded.run(links, body)
    assert recorded.graph is not None

    def launch() -> None:
        with torch.cuda.stream(stream):
            recorded.run(links, body)

    with ThreadPoolExecutor(1) as threads:

        def body_meanwhile(tensors: dict[str, Tensor], steps: int) -> None:
            states = tensors["states"]
            products(states[: links // 2])
            threads.submit(launch).result()
            products(states[links // 2 - 1 :])

        for _ in range(20):
            fresh = buffers()
            own = fresh.tensors["states"].clone()
            products(own)
            fresh.run(links, body_meanwhile)
            torch.cuda.synchronize()
            assert torch.equal(recorded.tensors["states"], expected)
            assert torch.equal(fresh.tensors["states"], own)


def test_a_thread_that_waits_for_the_device_only_delays_a_recording() -> None:
    """CUDA ends a recording then; the call goes on without a graph, and is right."""
    module = nn.LSTM(32, 1024, device="cuda").requires_grad_(False)
    x = torch.randn(130, 2, 32, device="cuda")
    expected = states_and_gradient(module, x)
    done = False

    def wait() -> int:
        refused = 0
        while not done:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                refused += 1
        return refused

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        try:
            for _ in range(20):
                scan_registry.rnn_buffers.clear()
                for _ in range(3):
                    for out, right in zip(states_and_gradient(module, x), expected, strict=True):
                        assert torch.equal(out, right)
        finally:
            done = True
        waiting.result()


def test_memory_goes_with_the_module() -> None:
    def use() -> None:
        module = nn.LSTM(64, 2048, device="cuda", dtype=torch.float16)
        x = torch.randn(130, 256, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3):
            module(x)[0].sum().backward()

    torch.nn.Linear(8, 8, device="cuda")(torch.randn(8, 8, device="cuda")).sum().backward()
    gc.collect()
    torch.cuda.synchronize()
    before, kept = torch.cuda.memory_allocated(), scan_registry.rnn_buffers.size
    use()
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= WORKSPACES
    assert scan_registry.rnn_buffers.size <= kept


def test_kept_memory_has_a_bound_that_users_set() -> None:
    pool = scan_registry.rnn_buffers
    usual = pool.max_size
    module = nn.LSTM(64, 2048, device="cuda", dtype=torch.float16)
    x = torch.randn(70, 256, 64, device="cuda", dtype=torch.float16)
    expected = module(x)[0]
    assert 0 < pool.size <= usual
    try:
        for bound in (100 * MEGABYTE, 0):
            pool.max_size = bound
            assert torch.equal(module(x)[0], expected)
            assert pool.size <= bound
    finally:
        pool.max_size = usual


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_strides_match_those_of_cudnn(kind: str, first: bool) -> None:
    options = {"batch_first": first, "device": "cuda"}
    for hidden in (48, 1024):
        theirs, ours = (getattr(home, kind)(24, hidden, **options) for home in (torch.nn, nn))
        x = torch.randn(33, 5, 24, device="cuda")
        assert ours(x)[0].stride() == theirs(x)[0].stride()
