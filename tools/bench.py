"""Time linear_scan on this GPU, beside installed peers and the time it takes to move the bytes.

    python tools/bench.py                     the table of the README
    python tools/bench.py --json FILE         the same, with every number
    python tools/bench.py --case time_last:8,1536,4096:bfloat16

Each timing is a CUDA graph of launches over several sets of inputs, more of them than the L2 cache
holds. All graphs of a case are replayed in turns, and the median replay counts. Peers are timed at
their kernels, without their wrappers' checks and zero fills. The floor is the bytes that must move
over the bandwidth of a large ``torch.add``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import installed
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import scan_registry

PASSES = ("forward", "backward")
DTYPES = ("float32", "bfloat16", "float16")
L2_TIMES = 3  # inputs rotate over this many L2 caches
LAUNCHES = 12  # in a graph, at least
WARM_UP, ROUNDS = 4, 11  # replays of each graph


@dataclass(frozen=True)
class Case:
    """One scan to time: (batch, channels, time), whatever the layout in memory."""

    layout: str
    batch: int
    channels: int
    time: int
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Case:
        try:
            layout, shape, dtype = text.split(":")
            batch, channels, time = map(int, shape.split(","))
        except ValueError:
            raise SystemExit(
                f"--case is {text!r}; expected layout:batch,channels,time:dtype"
            ) from None
        if layout not in ("time_last", "channel_last") or dtype not in DTYPES:
            raise SystemExit(
                f"--case is {text!r}; layouts are time_last and channel_last, dtypes {DTYPES}"
            )
        return cls(layout, batch, channels, time, dtype)

    @property
    def dim(self) -> int:
        return -1 if self.layout == "time_last" else 1

    def sequence(self) -> Tensor:
        order = (
            (self.channels, self.time) if self.layout == "time_last" else (self.time, self.channels)
        )
        return torch.randn(self.batch, *order, device="cuda", dtype=getattr(torch, self.dtype))

    def tensor_bytes(self) -> int:
        return self.batch * self.channels * self.time * getattr(torch, self.dtype).itemsize

    def traffic(self, direction: str) -> int:
        """Bytes that must move: two reads and a write, or three reads and two writes."""
        return self.tensor_bytes() * (3 if direction == "forward" else 5)


@dataclass(frozen=True)
class Timing:
    """Median and spread (largest minus smallest) of a call, in ms, by who made it."""

    case: Case
    direction: str
    who: str
    ms: float
    spread: float
    floor_ms: float


def default_cases() -> list[Case]:
    shapes = [("time_last", 8, 1536, t) for t in (128, 512, 2048, 8192, 32768)]
    shapes += [("channel_last", 8, 1024, t) for t in (1024, 8192, 32768)]
    return [Case(*shape, dtype) for shape in shapes for dtype in ("float32", "bfloat16")]


@dataclass(frozen=True)
class Recording:
    """A CUDA graph of launches, and how many."""

    graph: torch.cuda.CUDAGraph
    launches: int
    inputs: list[Callable[[], Any]]  # kept alive

    def ms(self) -> float:
        """Replay once; the time of one launch."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.launches


def record(calls: list[Callable[[], Any]]) -> Recording:
    """At least ``LAUNCHES`` of the calls, in turns; those of one turn write memory of their own."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    turns = -(-LAUNCHES // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            outputs = [call() for call in calls]
            del outputs
    return Recording(graph, turns * len(calls), calls)


def compete(recordings: list[Recording]) -> list[tuple[float, float]]:
    """Median and spread of each recording's ms per launch; all of them in turns, after a warm-up."""
    times: list[list[float]] = [[] for _ in recordings]
    for number in range(-WARM_UP, ROUNDS):
        for recording, measured in zip(recordings, times, strict=True):
            ms = recording.ms()
            if number >= 0:
                measured.append(ms)
    return [(statistics.median(measured), max(measured) - min(measured)) for measured in times]


def streaming_bandwidth() -> float:
    """Bytes per ms of a large elementwise kernel with two reads and a write."""
    a, b, out = (torch.randn(1 << 28, device="cuda") for _ in range(3))
    ((ms, _),) = compete([record([lambda: torch.add(a, b, out=out)])])
    return 3 * a.numel() * a.element_size() / ms


def ours(case: Case, direction: str, backend: str) -> Callable[[], Any]:
    gates, tokens = torch.sigmoid(case.sequence()), case.sequence()
    if direction == "forward":
        return lambda: scan_registry.linear_scan(gates, tokens, dim=case.dim, backend=backend)
    states = scan_registry.linear_scan(gates, tokens, dim=case.dim)
    step = torch.ops.scan_registry.linear_scan_backward
    return lambda: step(gates, states, tokens, case.dim, backend)


def contenders(case: Case, direction: str) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Who runs the case, and for each a function that prepares a call with inputs of its own."""
    for backend in ("cuda", "triton"):
        yield f"scan-registry {backend}", partial(ours, case, direction, backend)
    for peer in installed():
        make = peer.kernel_call(case, direction)
        if make is not None:
            yield peer.name, make


def measure(case: Case, bandwidth: float) -> Iterator[Timing]:
    """Both directions of a case, by everyone who can run it."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    for direction in PASSES:
        traffic = case.traffic(direction)
        sets = max(1, -(-L2_TIMES * cache // traffic))
        who, makers = zip(*contenders(case, direction), strict=True)
        recordings = [record([make() for _ in range(sets)]) for make in makers]
        for name, (ms, spread) in zip(who, compete(recordings), strict=True):
            yield Timing(case, direction, name, ms, spread, traffic / bandwidth)
        del recordings
        torch.cuda.empty_cache()


def print_table(timings: list[Timing], bandwidth: float) -> None:
    table = Table(title=f"{torch.cuda.get_device_name()}; streaming {bandwidth / 1e9:.2f} TB/s")
    for column in ("layout", "B, C, T", "dtype", "pass", "kernel"):
        table.add_column(column)
    for column in ("ms", "± ms", "TB/s", "of floor"):
        table.add_column(column, justify="right")
    for t in timings:
        c = t.case
        table.add_row(
            c.layout,
            f"{c.batch}, {c.channels}, {c.time}",
            c.dtype,
            t.direction,
            t.who,
            f"{t.ms:.4f}",
            f"{t.spread:.4f}",
            f"{c.traffic(t.direction) / t.ms / 1e9:.2f}",
            f"{t.floor_ms / t.ms:.2f}",
            end_section=t is timings[-1],
        )
    Console(width=130).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", type=Case.parse, help="layout:B,C,T:dtype")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        return 2
    bandwidth = streaming_bandwidth()
    cases = args.case or default_cases()
    timings = [t for case in track(cases, "timing") for t in measure(case, bandwidth)]
    print_table(timings, bandwidth)
    if args.json:
        record = {
            "gpu": torch.cuda.get_device_name(),
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "scan_registry": scan_registry.__version__,
            "streaming_bytes_per_ms": bandwidth,
            "timings": [asdict(t) for t in timings],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
