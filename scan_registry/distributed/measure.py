"""Measuring what the cost model has to know of a group, and how long calls take that all ranks make together.

Nothing is measured unless it is asked for. A measurement is a row of collectives: hidden in a first call it would have
to be made by every rank at that call, would keep CUDA graphs from recording it, and would make the choice of a schedule
differ from run to run. So a group goes by the defaults of ``scan_registry.distributed.machines`` until every rank of it
has called ``measure``.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from scan_registry.distributed.group import resolve
from scan_registry.distributed.machines import Machine, default

if TYPE_CHECKING:
    from scan_registry.distributed.group import Group

Call = Callable[[], Any]

#: The former name of torch before 2.13, which warns of it.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

WARM_UP, ROUNDS = 3, 9  # calls of each measurement
_PIECES = 8  # of the chain that a piece's cost is measured with
_SIZES = {"cuda": (1 << 26, 1 << 22), "cpu": (1 << 24, 1 << 18)}  # floats: streamed, and gathered
_CYCLES = 2e9  # of a GPU's clock a second, about
_MOST_SLEEP = 0.05  # seconds

_measured: WeakKeyDictionary[dist.ProcessGroup, Machine] = WeakKeyDictionary()


# --- Calls of a group -------------------------------------------------------------------------


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


# --- The machine of a group -------------------------------------------------------------------


def machine_of(group: dist.ProcessGroup, device: torch.device) -> Machine:
    """What was measured of the group, or else the default for the device.

    The default goes by the GPU's name and, for a group of all ranks, by torchrun's ``LOCAL_WORLD_SIZE``. Where these
    differ from rank to rank, so does what is returned.
    """
    found = _measured.get(group)
    if found is not None:
        return found
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    whole = dist.get_world_size(group) == dist.get_world_size()
    local = os.environ.get("LOCAL_WORLD_SIZE", "") if whole else ""
    return default(device.type, name, ranks_per_node=int(local) if local.isdecimal() else 0)


def measure(group: Group = None, device: torch.device | None = None) -> Machine:
    """Measure what the choice of a schedule goes by, on all ranks of a group, and use it for this group from then on.

    Every rank of the group has to call it; it takes about a second. It measures how fast memory streams
    (``torch.add``), the latency and the bandwidth of an all-gather, and what passing pieces through all ranks costs.
    What a hop costs is not told apart from what a call costs, and stays as in the defaults.

    Args:
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for the default group.
        device: of this rank; that of the group's backend unless given: with gloo the CPU, else the current GPU.

    Returns:
        The machine, which is the same on every rank.
    """
    members = resolve(group)
    device = device or _device(members.group)
    watch, ranks = Stopwatch(members.group, device), members.size
    start = default(device.type, ranks_per_node=_ranks_per_node(members.group))
    streamed, gathered = _SIZES[device.type]
    memory, launch = _memory(watch, streamed)
    found = replace(
        start,
        name=f"{ranks} ranks on {_named(device)}",
        memory=memory,
        launch=launch,
        source="measured by scan_registry.distributed.measure; hops as in the defaults",
    )
    if ranks > 1:
        found = _measure_messages(found, watch, gathered)
    _measured[members.group] = found
    return found


def _memory(watch: Stopwatch, count: int) -> tuple[float, float]:
    """Bytes a second of a large operation, and seconds of a small one."""
    a, b, out = (torch.rand(count, device=watch.device) for _ in range(3))
    few = torch.zeros(4, device=watch.device)
    large, small = watch.latencies([lambda: torch.add(a, b, out=out), lambda: few.add_(1)])
    return 3 * out.numel() * out.element_size() / large.least, small.least


def _measure_messages(machine: Machine, watch: Stopwatch, gathered: int) -> Machine:
    """The machine with the costs of an all-gather and of passing on."""
    group, ranks = watch.group, dist.get_world_size(watch.group)
    small, large = (torch.zeros(size, device=watch.device) for size in (4, gathered))
    few, many = (torch.empty(ranks * each.numel(), device=watch.device) for each in (small, large))
    times = watch.latencies(
        [
            lambda: all_gather(few, small, group=group),
            lambda: all_gather(many, large, group=group),
            lambda: _chain(small, 1, group),
            lambda: _chain(small, 1 + _PIECES, group),
        ]
    )
    least, most, once, often = (each.least for each in times)
    size = large.numel() * large.element_size()
    link = (ranks - 1) * size / max(most - least, 1e-9)
    free = replace(machine, call=0.0, send=0.0, link=link, far_link=link)
    piece = max(machine.launch, (often - once) / _PIECES)
    hops = (once - ranks * piece - free.passing(ranks, 16)) / (ranks - 1)
    return replace(
        free, call=max(0.0, least - free.all_gather(ranks, 16)), send=max(0.0, hops), piece=piece
    )


def _chain(held: Tensor, pieces: int, group: dist.ProcessGroup) -> None:
    """Messages from the first rank to the last, with a small kernel on each."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for _ in range(pieces):
        if rank > 0:
            dist.recv(held, dist.get_global_rank(group, rank - 1), group)
        held.add_(1)
        if rank < ranks - 1:
            dist.send(held, dist.get_global_rank(group, rank + 1), group)


def _device(group: dist.ProcessGroup) -> torch.device:
    if dist.get_backend(group) == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _ranks_per_node(group: dist.ProcessGroup) -> int:
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group)
    return -(-len(hosts) // len(set(hosts)))


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
