"""Times of one sequence on all ranks of a group, beside one rank with all of it.

Where ``torchrun`` has started the process its ranks are the group, else the process is a group of one. A time is that of
one call, from when all ranks are ready until the last is done, so that waiting for other ranks counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from scan_registry.bench.latency import Call, Latency, Stopwatch
from scan_registry.bench.timing import cache_bytes, free_bytes
from scan_registry.distributed import linear_scan
from scan_registry.distributed.group import gather
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.linear_scan.op.function import linear_scan as local_scan
from scan_registry.ops import benchmark
from scan_registry.version import __version__

__all__ = ["PASSES", "Case", "GroupBench", "Timing", "group_on"]

PASSES = ("forward", "backward", "forward+backward")
COPY, GATHER, ALL, ALONE = "copy", "all-gather", "all ranks", "one rank"
_TENSORS = 7  # of one call's size: gates, tokens, states, the incoming gradient, two gradients, and one to spare
_CACHES = 3  # times which a GPU writes the size of its cache before a call
_TIMEOUT = timedelta(minutes=3)


@dataclass(frozen=True)
class Timing(benchmark.Timed):
    """A call of "copy", "all-gather", "all ranks" or "one rank"; and in how many ms the host is through with it, on the CPU the
    same."""

    case: Case
    host_ms: float

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "case": self.case.to_json()}


# --- The group --------------------------------------------------------------------------------


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def group_on(kind: str) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The group of all ranks, and this rank's device: NCCL on ``cuda``, gloo on ``cpu``."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    settings: dict[str, Any] = {"timeout": _TIMEOUT}
    if not started_by_torchrun():
        settings |= {"store": HashStore(), "rank": 0, "world_size": 1}
    if kind == "cuda":
        settings["device_id"] = device
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **settings)
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world, device
    finally:
        dist.destroy_process_group()


# --- The benchmark ----------------------------------------------------------------------------


@dataclass
class GroupBench:
    """Times cases on a group.

    passes   those of ``PASSES`` that are timed
    skipped  what could not be timed, and why; it grows, alike on every rank
    """

    group: dist.ProcessGroup
    device: torch.device
    passes: Sequence[str] = PASSES
    timings: list[Timing] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        flush = _CACHES * cache_bytes(self.device) if self.device.type == "cuda" else 0
        self.watch = Stopwatch(self.group, self.device, flush)

    @property
    def name(self) -> str:
        """How many ranks, on what."""
        if self.device.type == "cuda":
            return f"{self.ranks} × {torch.cuda.get_device_name(self.device)}, NCCL"
        return f"{self.ranks} processes with {torch.get_num_threads()} threads each, gloo"

    def check_room(self, case: Case) -> None:
        """``ValueError``, on every rank, if one of them has no memory for its part."""
        part = replace(case, time=max(1, even(case.time, self.ranks)[0]))
        if not self._fits(part):
            raise ValueError(f"T = {case.time} takes more memory than is free on {self.device}")

    def run(self, case: Case) -> None:
        """Time the passes of a case."""
        part = Part(replace(case, time=even(case.time, self.ranks)[self.rank]), self.device)
        whole = self._whole(case)
        for direction in self.passes:
            calls: dict[str, Call | None] = {COPY: part.copy()} if direction == "forward" else {}
            if self.ranks > 1:
                if direction == "forward":
                    calls[GATHER] = self._gather(case)
                calls[ALL] = part.call(direction, self._scan(case))
            if whole is not None:
                calls[ALONE] = whole.call(direction, _one_rank(case)) if self.rank == 0 else None
            latencies = self.watch.latencies([*calls.values()])
            for who, latency in zip(calls, latencies, strict=True):
                self.timings.append(_timing(case, direction, who, latency))

    def _whole(self, case: Case) -> Part | None:
        """What the first rank has to scan alone, and an empty part on other ranks; None if that does not fit."""
        if not self._fits(case, self.rank == 0):
            self.skipped[f"{ALONE}, {case}"] = "the whole sequence does not fit into its memory"
            return None
        return Part(case if self.rank == 0 else replace(case, time=0), self.device)

    def _fits(self, case: Case, concerned: bool = True) -> bool:
        free = free_bytes(self.device)
        short = concerned and free is not None and _TENSORS * case.tensor_bytes() > free
        (any_short,) = self.watch.largest(float(short))
        return not any_short

    def _scan(self, case: Case) -> Callable[[Tensor, Tensor], Tensor]:
        def scan(gates: Tensor, tokens: Tensor) -> Tensor:
            return linear_scan(gates, tokens, group=self.group, dim=case.dim)

        return scan

    def _gather(self, case: Case) -> Call:
        """Two float32 rows a channel, of each rank."""
        rows = torch.zeros(2 * case.batch * case.channels, device=self.device)
        every = torch.empty(self.ranks * rows.numel(), device=self.device)
        return lambda: gather(every, rows, group=self.group)

    def document(self) -> dict[str, Any]:
        """The stable form, as ``schemas/bench-distributed.json`` describes it: keys are only ever added."""
        cuda = self.device.type == "cuda"
        return {
            "gpu": torch.cuda.get_device_name(self.device) if cuda else None,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "scan_registry": __version__,
            "device": self.name,
            "ranks": self.ranks,
            "timings": [timing.to_json() for timing in self.timings],
            "skipped": dict(self.skipped),
        }


class Part:
    """Random inputs of a case, and calls on them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.gates = case.random_gates(device).requires_grad_()
        self.tokens = case.sequence(device).requires_grad_()
        self.grad = torch.randn_like(self.tokens)

    def copy(self) -> Call:
        source, out = self.tokens.detach(), torch.empty_like(self.tokens)
        return lambda: out.copy_(source)

    def call(self, direction: str, scan: Callable[[Tensor, Tensor], Tensor]) -> Call:
        """One pass. Backward goes over the same graph again and again."""
        inputs = (self.gates, self.tokens)
        if direction == "forward":

            def forward() -> Tensor:
                with torch.no_grad():
                    return scan(*inputs)

            return forward
        if direction == "backward":
            states = scan(*inputs)
            return lambda: torch.autograd.grad(states, inputs, self.grad, retain_graph=True)
        return lambda: torch.autograd.grad(scan(*inputs), inputs, self.grad)


def even(time: int, ranks: int) -> list[int]:
    """Steps of each rank: the same, or one more on the first ranks."""
    least, more = divmod(time, ranks)
    return [least + (rank < more) for rank in range(ranks)]


def _timing(case: Case, direction: str, who: str, latency: Latency) -> Timing:
    ms, spread, host = (1e3 * value for value in (latency.seconds, latency.spread, latency.host))
    return Timing(case, direction, who, ms, spread, host)


def _one_rank(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    def scan(gates: Tensor, tokens: Tensor) -> Tensor:
        return local_scan(gates, tokens, dim=case.dim)

    return scan
