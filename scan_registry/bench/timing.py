"""Timing several implementations fairly: interleaved, over inputs that no cache holds.

On a GPU a recording is a CUDA graph of launches, so that what is measured is the kernels; where
something cannot be recorded, the launches themselves between two events. On the CPU it is the wall
clock of the calls.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from scan_registry.ops.benchmark import Call

ENOUGH_MS = 3.0  # of calls in a recording, about: a GPU takes 0.01 to begin one
LAUNCHES = 4  # that a GPU replays at once, at least
LAUNCH_MS = 0.05  # that a launch takes, at most: in a graph it may take far less
WARM_UP, ROUNDS = 4, 11  # replays of each recording
#: Inputs rotate over this many last-level caches: lines that are to leave an L2 last survive several times its size
#: of other traffic (measured, in the notes of the scans' kernels).
CACHES = {"cuda": 24, "cpu": 3}
MOST_SETS = 256  # of inputs, however small they are
LEAST_STREAMED = 1 << 22  # floats, where the cache is small
_USUAL_CACHE = 32 << 20  # where the C library does not tell


class Recording(Protocol):
    """Calls that can be made again and again."""

    def ms(self) -> float:
        """Make them all; the time of one."""


@dataclass(frozen=True)
class Graph:
    """A CUDA graph of launches, and how many."""

    graph: torch.cuda.CUDAGraph
    launches: int
    calls: Sequence[Call]  # kept alive, with their inputs

    def ms(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / self.launches


@dataclass(frozen=True)
class Launches:
    """Launches one after the other; a kernel shorter than its launch is measured as that."""

    turns: int
    calls: Sequence[Call]

    def ms(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(self.turns):
            for call in self.calls:
                call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / (self.turns * len(self.calls))


@dataclass(frozen=True)
class WallClock:
    """Calls that return when they are done."""

    turns: int
    calls: Sequence[Call]

    def ms(self) -> float:
        begin = time.perf_counter()
        for _ in range(self.turns):
            for call in self.calls:
                call()
        return 1e3 * (time.perf_counter() - begin) / (self.turns * len(self.calls))


def record(
    calls: Sequence[Call],
    device: torch.device,
    captured: bool = True,
    enough: float | None = None,
    launches: int = LAUNCHES,
) -> Recording:
    """Enough turns of the calls; in a graph those of one turn write memory of their own.

    captured: whether a CUDA graph can record them.
    enough: ms that all turns take, about; ``ENOUGH_MS`` unless given.
    launches: how many a graph has, at least.
    """
    for call in calls[:2]:
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    captured = captured and device.type == "cuda"
    ms = _recording(1, calls, device, captured=False).ms()
    if captured and ms < LAUNCH_MS:
        turn = _recording(1, calls, device, captured)
        turn.ms()  # a graph's first replay takes longer
        ms = turn.ms()
    least = -(-launches // len(calls)) if captured else 1
    turns = round((ENOUGH_MS if enough is None else enough) / max(ms * len(calls), 1e-3))
    return _recording(max(least, turns), calls, device, captured)


def turn(calls: Sequence[Call], device: torch.device) -> Recording:
    """One turn of calls that have been made before, but at least as many launches as a GPU is to replay at once."""
    captured = device.type == "cuda"
    least = -(-LAUNCHES // len(calls)) if captured else 1
    return _recording(least, calls, device, captured)


def once(call: Call, device: torch.device) -> float:
    """ms of a launch on a GPU, or a call on the CPU, when it has been made before: about, and at once."""
    return _recording(2, [call], device, captured=False).ms()


def _recording(
    turns: int, calls: Sequence[Call], device: torch.device, captured: bool
) -> Recording:
    if captured:
        return Graph(_captured(calls, turns), turns * len(calls), calls)
    return (WallClock if device.type == "cpu" else Launches)(turns, calls)


def _captured(calls: Sequence[Call], turns: int) -> torch.cuda.CUDAGraph:
    """A captured graph. ``torch.cuda.graph`` is not used, as it empties the allocator's cache each time."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool)
        try:
            try:
                for _ in range(turns):
                    outputs = [call() for call in calls]
                    del outputs
            finally:
                graph.capture_end()
        except BaseException:
            _undo_capture(pool)
            raise
    return graph


def _undo_capture(pool: Any) -> None:
    """What the end of a capture does to torch, which leaves it undone where CUDA refuses the graph.

    Then the allocator believes that a capture goes on, and empties its cache no more. In versions before 2.13 so does
    the generator of random numbers, and draws none. Undoing it twice raises an error, which is suppressed.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # the allocator's capture has ended
        # Older versions of torch have the former name.
        former, name = "_cuda_endAllocateCurrentStreamToPool", "_cuda_endAllocateToPool"
        end = getattr(torch._C, name, None) or getattr(torch._C, former)
        end(device, pool)
        torch._C._cuda_releasePool(device, pool)
    # There is no function that tells the generator, but the end of a capture that succeeds.
    with torch.cuda.stream(torch.cuda.Stream()), warnings.catch_warnings(), suppress(RuntimeError):
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        nothing = torch.cuda.CUDAGraph()
        nothing.capture_begin()
        nothing.capture_end()


def compete(
    recordings: Sequence[Recording], warm_up: int = WARM_UP, rounds: int = ROUNDS
) -> list[tuple[float, float]]:
    """Median and spread of each recording's ms per call; all of them interleaved, after a warm-up."""
    times: list[list[float]] = [[] for _ in recordings]
    for number in range(-warm_up, rounds):
        for recording, measured in zip(recordings, times, strict=True):
            ms = recording.ms()
            if number >= 0:
                measured.append(ms)
    return [(statistics.median(measured), max(measured) - min(measured)) for measured in times]


def cache_bytes(device: torch.device) -> int:
    """Size of the cache before the memory: a GPU's L2, a processor's L3."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):
        size = 0
    return size if size > 0 else _USUAL_CACHE


def sets_of_inputs(traffic: int, device: torch.device) -> int:
    """How many sets a call that moves so many bytes rotates over."""
    return min(MOST_SETS, max(1, -(-CACHES[device.type] * cache_bytes(device) // traffic)))


def streaming_bandwidth(device: torch.device) -> float:
    """Bytes per ms of a large elementwise operation with two reads and a write."""
    count = 1 << 28 if device.type == "cuda" else max(LEAST_STREAMED, cache_bytes(device) // 4)
    a, b, out = (torch.randn(count, device=device) for _ in range(3))
    ((ms, _),) = compete([record([lambda: torch.add(a, b, out=out)], device)])
    return 3 * a.numel() * a.element_size() / ms


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
