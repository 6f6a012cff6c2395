"""Measures the latency of calls that all ranks of a group make together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], Any]

WARM_UP, ROUNDS = 3, 9  # calls before and in each measurement
_CYCLES = 2e9  # cycles per second of a GPU's clock, about
_MOST_SLEEP = 0.05  # seconds


@dataclass(frozen=True)
class Latency:
    """The latency of one call in seconds. Each round counts with the largest value of all ranks.

    seconds  from when all ranks are ready until the last rank is done: the median of all rounds
    spread   the longest round less the shortest
    host     how long the call occupies the CPU: the median of all rounds. For CPU tensors equal to ``seconds``
    """

    seconds: float
    spread: float
    host: float


class Stopwatch:
    """Times calls that all ranks of a group make together.

    On a GPU, two CUDA events on the current stream measure the time: one after an all-reduce in which ranks wait for each
    other, one after the call. Before the all-reduce the GPU sleeps for about as long as the CPU takes to launch the call,
    at most 50 ms, so that launches are not part of the time. A call that waits for the GPU while it is launched waits for
    this sleep, too: ``host`` then includes the sleep, and the launches after the wait are part of the time. On the CPU the
    time is that of the wall clock after a barrier.

    flush: bytes that a GPU writes before each call, so that no cache holds the call's inputs.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, flush: int = 0) -> None:
        self.group, self.device = group, device
        self._flushed = torch.empty(flush, dtype=torch.uint8, device=device)
        self._flag = torch.zeros(1, device=device)

    def latencies(
        self, calls: list[Call | None], warm_up: int = WARM_UP, rounds: int = ROUNDS
    ) -> list[Latency]:
        """The latency of each call; rounds of the calls are interleaved. Every rank passes equally many calls, and None for a
        call that it takes no part in."""
        samples: list[list[tuple[float, float]]] = [[] for _ in calls]
        hosts = [0.0] * len(calls)
        for number in range(-warm_up, rounds):
            for place, call in enumerate(calls):
                seconds, hosts[place] = self._once(call, hosts[place])
                if number >= 0:
                    samples[place].append((seconds, hosts[place]))
        return [
            Latency(
                statistics.median(seconds for seconds, _ in of_call),
                max(seconds for seconds, _ in of_call) - min(seconds for seconds, _ in of_call),
                statistics.median(host for _, host in of_call),
            )
            for of_call in samples
        ]

    def largest(self, *values: float) -> list[float]:
        """The largest of all ranks for each value; the same result on every rank."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group)
        return [float(value) for value in tensor.tolist()]

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
