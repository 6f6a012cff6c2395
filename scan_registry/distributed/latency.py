"""How long calls take that all ranks of a group make together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], Any]

#: The former name of torch before 2.13, which warns of it.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

WARM_UP, ROUNDS = 3, 9  # calls of each measurement
_CYCLES = 2e9  # of a GPU's clock a second, about
_MOST_SLEEP = 0.05  # seconds


@dataclass(frozen=True)
class Latency:
    """Of one call, in seconds, the largest of all ranks.

    seconds  from when all ranks are ready until the last is done: the median of all rounds
    spread   the longest round less the shortest
    least    of the shortest round, which other processes on the machine disturb the least
    host     in which the host is through with it; on the CPU the same
    """

    seconds: float
    spread: float
    least: float
    host: float


class Stopwatch:
    """Times calls that all ranks of a group make together.

    On a GPU the clock is the stream's: ranks meet in an all-reduce on the stream, between which and the end of the call
    lie two events. Before that the GPU sleeps for as long as the host takes for the call, so that launches are not what
    is measured. On the CPU it is the wall clock after a barrier.

    flush: bytes that a GPU writes before each call, so that no cache holds the call's inputs.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, flush: int = 0) -> None:
        self.group, self.device = group, device
        self._flushed = torch.empty(flush, dtype=torch.uint8, device=device)
        self._flag = torch.zeros(1, device=device)

    def latencies(
        self, calls: list[Call | None], warm_up: int = WARM_UP, rounds: int = ROUNDS
    ) -> list[Latency]:
        """Of each call, all of them interleaved. Every rank gives as many; None where it has no part in one."""
        found: list[list[tuple[float, float]]] = [[] for _ in calls]
        hosts = [0.0] * len(calls)
        for number in range(-warm_up, rounds):
            for place, call in enumerate(calls):
                seconds, hosts[place] = self._once(call, hosts[place])
                if number >= 0:
                    found[place].append((seconds, hosts[place]))
        return [
            Latency(
                statistics.median(seconds for seconds, _ in each),
                max(seconds for seconds, _ in each) - min(seconds for seconds, _ in each),
                min(seconds for seconds, _ in each),
                statistics.median(host for _, host in each),
            )
            for each in found
        ]

    def latency(self, call: Call | None) -> Latency:
        (found,) = self.latencies([call])
        return found

    def largest(self, *values: float) -> list[float]:
        """Of all ranks, each value's largest: the same on all of them."""
        held = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(held, dist.ReduceOp.MAX, self.group)
        return [float(value) for value in held.tolist()]

    def _once(self, call: Call | None, host: float) -> tuple[float, float]:
        call = call or _nothing
        if self.device.type != "cuda":
            dist.barrier(self.group)
            begin = time.perf_counter()
            call()
            (seconds,) = self.largest(time.perf_counter() - begin)
            return seconds, seconds
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        sleep = min(_MOST_SLEEP, 2e-4 + 1.5 * host)
        self._flushed.zero_()
        torch.cuda._sleep(int(sleep * _CYCLES))
        dist.all_reduce(self._flag, group=self.group)
        first.record()
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        last.record()
        last.synchronize()
        seconds, slowest = self.largest(1e-3 * first.elapsed_time(last), took)
        return seconds, slowest


def _nothing() -> None:
    pass
