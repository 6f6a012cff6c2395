"""Recurrent modules beside torch.nn's, on the CPU or a GPU: ``python tools/bench_rnn.py --device cuda``.

A time is that of one call among several that follow each other, until the device has done them all; so it is the host's
time where calls are short, and the device's where they are long. Rounds of both packages take turns. On the CPU times of
one thread are CPU time, which other processes change less than elapsed time. Those of more threads are elapsed time, which
is right only on an idle machine, as torch's threads wait for each other at every product.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scan_registry import __version__, nn

KINDS = ("LSTM", "GRU")
STEPS, BATCHES, UNITS = (1, 8, 64, 512), (1, 16, 128), (32, 128, 512)
DTYPES = ("float32", "float16", "bfloat16", "float64")
PASSES = ("forward", "forward+backward")
ROUND = 2e-3  # seconds at least of one round
ROUNDS = 3  # of each package at least, however little time is left
SLOWER = 1.05  # ratios above are listed at the end

Call = Callable[[], object]
Clock = Callable[[], float]


class Case(NamedTuple):
    """One network, one size and one pass."""

    kind: str
    steps: int
    batch: int
    units: int
    what: str

    def __str__(self) -> str:
        return f"{self.kind:5} T {self.steps:<4} B {self.batch:<4} D {self.units:<4} {self.what:16}"


def clock_of(device: str) -> Clock:
    """Seconds; on a GPU after all that it was given is done."""
    if device == "cpu":
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def a_round(call: Call, clock: Clock, count: int) -> float:
    """Seconds a call, of ``count`` calls."""
    start = clock()
    for _ in range(count):
        call()
    return (clock() - start) / count


def timed(calls: Sequence[Call], clock: Clock, budget: float) -> list[list[float]]:
    """The times of each call's rounds, for ``budget`` seconds of elapsed time, the first calls included."""
    end = time.perf_counter() + budget
    counts = []
    for call in calls:
        call()  # loads kernels, and chooses among them
        count = 1
        while (taken := a_round(call, clock, count) * count) < ROUND:
            count = max(2 * count, math.ceil(1.2 * count * ROUND / max(taken, 1e-6)))
        counts.append(count)
    found: list[list[float]] = [[] for _ in calls]
    while len(found[0]) < ROUNDS or time.perf_counter() < end:
        for each, call, count in zip(found, calls, counts, strict=True):
            each.append(a_round(call, clock, count))
    return found


def calls_of(case: Case, device: str, dtype: torch.dtype) -> list[Call]:
    """This package's, then torch's."""
    made = {"batch_first": True, "device": device, "dtype": dtype}
    theirs = getattr(torch.nn, case.kind)(case.units, case.units, **made)
    ours = getattr(nn, case.kind)(case.units, case.units, **made)
    ours.load_state_dict(theirs.state_dict())
    shape = case.batch, case.steps, case.units
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=case.what != "forward")
    grad = torch.randn(shape, dtype=dtype, device=device)

    def forward(module: torch.nn.Module) -> object:
        with torch.no_grad():
            return module(x)

    def both(module: torch.nn.Module) -> object:
        return torch.autograd.grad(module(x)[0], [x, *module.parameters()], grad)

    run = forward if case.what == "forward" else both
    modules = [module.train(run is both) for module in (ours, theirs)]
    return [lambda module=module: run(module) for module in modules]  # type: ignore[misc]


def cases_of(given: argparse.Namespace) -> list[Case]:
    """Those whose size is not above ``--largest``."""
    every = product(given.kinds, given.steps, given.batches, given.units, given.passes)
    return [
        Case(*one) for one in every if not given.largest or math.prod(one[1:4]) <= given.largest
    ]


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each case. Each has an equal share of the time that those before it left."""
    clock, cases = clock_of(given.device), cases_of(given)
    end = time.perf_counter() + given.budget
    for number, case in enumerate(cases):
        share = (end - time.perf_counter()) / (len(cases) - number)
        calls = calls_of(case, given.device, getattr(torch, given.dtype))
        rounds = timed(calls, clock, share)
        summary = min if given.by == "least" else statistics.median
        ours, theirs = map(summary, rounds)
        yield case._asdict() | {
            "ours_us": 1e6 * ours,
            "theirs_us": 1e6 * theirs,
            "ratio": ours / theirs,
            "rounds": len(rounds[0]),
            "ours_median_us": 1e6 * statistics.median(rounds[0]),
            "theirs_median_us": 1e6 * statistics.median(rounds[1]),
        }


def facts(given: argparse.Namespace) -> dict[str, Any]:
    """What the times depend on. torch allows TF32 to cuDNN by default, and does not to cuBLAS."""
    on_gpu = given.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {given.threads} threads",
        "dtype": given.dtype,
        "by": given.by,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "scan_registry": __version__,
        "tf32_of_cudnn": torch.backends.cudnn.allow_tf32,
        "tf32_of_matmul": torch.backends.cuda.matmul.allow_tf32,
    }


def said(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The summary: the mean speed-up, the worst ratio, and each that is slower than ``SLOWER``."""
    ratios = [row["ratio"] for row in rows]
    speedup = math.exp(-statistics.fmean(map(math.log, ratios)))
    slow = sorted((row for row in rows if row["ratio"] > SLOWER), key=lambda row: -row["ratio"])
    return [
        f"{len(rows)} ratios, geometric mean of the speed-up {speedup:.3f}, worst ratio {max(ratios):.3f}",
        f"{len(slow)} slower than {SLOWER}",
        *(f"  {line(row)}" for row in slow),
    ]


def line(row: Mapping[str, Any]) -> str:
    """A row as text."""
    case = Case(*(row[name] for name in Case._fields))
    return f"{case} {row['ours_us']:10.1f} / {row['theirs_us']:10.1f} us = {row['ratio']:.3f}"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""

    def names(text: str) -> list[str]:
        return text.split(",")

    def sizes(text: str) -> list[int]:
        return [*map(int, text.split(","))]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=1, help="of the CPU")
    add("--dtype", choices=DTYPES, default="float32")
    add("--kinds", type=names, default=KINDS, help="of LSTM, GRU and RNN")
    add("--steps", type=sizes, default=STEPS)
    add("--batches", type=sizes, default=BATCHES)
    add("--units", type=sizes, default=UNITS)
    add("--passes", type=names, default=PASSES, help=" and ".join(PASSES))
    add("--largest", type=int, help="steps · batch · units at most")
    add("--budget", type=float, default=60, help="seconds for all cases")
    add("--by", choices=("least", "median"), default="least", help="of the rounds")
    add("--no-tf32", action="store_true", help="neither for cuDNN nor for products of matrices")
    add("--json", type=Path, help="a file for facts and rows, written after each case")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    torch.set_num_threads(given.threads)
    if given.no_tf32:
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    about, rows = facts(given), []
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    for row in measured(given):
        rows.append(row)
        print(line(row), flush=True)
        if given.json:
            given.json.write_text(json.dumps({"facts": about, "rows": rows}, indent=1) + "\n")
    print("\n".join(said(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
