"""The CPU's time for one call of each operator over ranks, with tensors so small that only overhead counts.

    python tools/distributed_host_time.py                  two processes over gloo
    python tools/distributed_host_time.py --group fake     one process, in a group whose collectives do nothing
    python tools/distributed_host_time.py --group fake --profile "linear_scan reduce"    where the time goes

Rows are medians over rounds, in microseconds of CPU time of the thread that makes the calls. Time that the thread waits is
left out.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import scan_registry
from scan_registry import distributed
from scan_registry.distributed import opening

RANKS, ROUNDS, CALLS = 2, 15, 20
Call = Callable[[], object]


def calls() -> dict[str, tuple[Call, Call]]:
    """A forward pass, and a forward and backward pass, of each operator over ranks and of ``linear_scan`` on one rank."""

    def scanned(schedule: str) -> tuple[Call, Call]:
        gates, tokens = (torch.rand(1, 8, 64, requires_grad=True) for _ in range(2))
        grad = torch.rand(1, 8, 64)

        def run() -> torch.Tensor:
            return distributed.linear_scan(gates, tokens, dim=1, schedule=schedule)  # type: ignore[arg-type]

        return run, lambda: torch.autograd.grad(run(), (gates, tokens), grad)

    u, delta = (torch.rand(1, 64, 8, requires_grad=True) for _ in range(2))
    A, B, C = -torch.rand(64, 4), torch.rand(1, 4, 8), torch.rand(1, 4, 8)
    x, weight = torch.rand(1, 64, 8, requires_grad=True), torch.rand(64, 4)
    grad = torch.rand(1, 64, 8)

    def selective() -> torch.Tensor:
        return distributed.selective_scan(u, delta, A, B, C)

    def convolution() -> torch.Tensor:
        return distributed.causal_conv1d(x, weight)

    gates, tokens = (torch.rand(1, 8, 64, requires_grad=True) for _ in range(2))

    def alone() -> torch.Tensor:
        return scan_registry.linear_scan(gates, tokens, dim=1)

    of_time = torch.rand(1, 8, 64)
    return {
        "linear_scan alone": (
            alone,
            lambda: torch.autograd.grad(alone(), (gates, tokens), of_time),
        ),
        "linear_scan reduce": scanned("reduce"),
        "linear_scan pass": scanned("pass"),
        "selective_scan": (selective, lambda: torch.autograd.grad(selective(), (u, delta), grad)),
        "causal_conv1d": (convolution, lambda: torch.autograd.grad(convolution(), x, grad)),
    }


def unrecorded(call: Call) -> Call:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def microseconds(call: Call) -> float:
    """CPU time of this thread: the median over rounds of the mean over a round's calls."""
    found = []
    for each in range(-2, ROUNDS):
        begin = time.thread_time()
        for _ in range(CALLS):
            call()
        if each >= 0:
            found.append(1e6 * (time.thread_time() - begin) / CALLS)
    return statistics.median(found)


def profile(call: Call) -> None:
    for _ in range(CALLS):
        call()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(CALLS * ROUNDS):
        call()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def measure(rank: int, profiled: str | None) -> None:
    torch.set_num_threads(1)
    for name, (forward, both) in calls().items():
        if profiled == name:
            profile(both)
        elif profiled is None:
            times = microseconds(unrecorded(forward)), microseconds(both)
            if rank == 0 or dist.get_backend() == "fake":
                print(f"{name:20} forward {times[0]:6.0f}, forward + backward {times[1]:6.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", choices=["gloo", "fake"], default="gloo")
    parser.add_argument("--profile", metavar="ROW")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.group == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        for rank in range(RANKS):
            print(f"rank {rank} of {RANKS}:")
            # As with NCCL, each call compares headers on their device, and does not read them.
            opening._reading_waits = lambda place: True
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
            measure(rank, given.profile)
            dist.destroy_process_group()
    elif given.rank is None:
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, __file__, "--store", str(Path(folder) / "store"), "--rank"]
            processes = [subprocess.Popen([*words, str(rank)]) for rank in range(RANKS)]
            sys.exit(max(process.wait() for process in processes))
    else:
        store = f"file://{given.store}"
        dist.init_process_group("gloo", init_method=store, rank=given.rank, world_size=RANKS)
        measure(given.rank, given.profile)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
