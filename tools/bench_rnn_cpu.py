"""Recurrent modules on the CPU beside torch.nn's: ``python tools/bench_rnn_cpu.py [--threads 1]``.

Times are the least of several, each long enough for the clock. With one thread they are CPU time, which
other processes change less than elapsed time. With more threads they are elapsed time, which is right
only on an idle machine, as torch's threads wait for each other at every product.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from itertools import product

import torch

from scan_registry import nn

KINDS = ("LSTM", "GRU")
STEPS, BATCHES, UNITS = (1, 8, 64, 512), (1, 16, 128), (32, 128, 512)
AT_LEAST = 1e-3  # seconds of calls for one time


def once(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds a call."""
    start, count = clock(), 0
    while True:
        call()
        count += 1
        if (taken := clock() - start) > AT_LEAST:
            return taken / count


def least(
    calls: list[Callable[[], object]], clock: Callable[[], float], budget: float
) -> list[float]:
    """The least time of each call. Calls are interleaved, for ``budget`` seconds of elapsed time."""
    found = [math.inf] * len(calls)
    for call in calls:
        call()
    end, rounds = time.perf_counter() + budget, 0
    while rounds < 3 or time.perf_counter() < end:
        found = [min(before, once(c, clock)) for before, c in zip(found, calls, strict=True)]
        rounds += 1
    return found


def calls_of(
    kind: str, steps: int, batch: int, units: int, dtype: torch.dtype
) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """Each pass, by this package and by torch."""
    theirs = getattr(torch.nn, kind)(units, units, batch_first=True, dtype=dtype)
    ours = getattr(nn, kind)(units, units, batch_first=True, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(batch, steps, units, dtype=dtype, requires_grad=True)
    grad = torch.randn(batch, steps, units, dtype=dtype)

    def forward(module: torch.nn.Module) -> object:
        with torch.no_grad():
            return module(x)

    def both(module: torch.nn.Module) -> object:
        return torch.autograd.grad(module(x)[0], [x, *module.parameters()], grad)

    yield "forward", [lambda: forward(ours), lambda: forward(theirs)]
    yield "forward+backward", [lambda: both(ours), lambda: both(theirs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of LSTM, GRU and RNN")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for each number")
    parser.add_argument("--largest", type=int, default=64 * 128 * 512, help="steps · batch · units")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.threads == 1 else time.perf_counter
    ratios = []
    for kind, steps, batch, units in product(given.kinds.split(","), STEPS, BATCHES, UNITS):
        if steps * batch * units > given.largest:
            continue
        for name, calls in calls_of(kind, steps, batch, units, getattr(torch, given.dtype)):
            ours, theirs = least(calls, clock, given.budget)
            ratios.append(ours / theirs)
            print(
                f"{kind:5} T {steps:<4} B {batch:<4} D {units:<4} {name:17} "
                f"{1e6 * ours:10.0f} / {1e6 * theirs:10.0f} us = {ours / theirs:.2f}",
                flush=True,
            )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"{len(ratios)} ratios, geometric mean {mean:.2f}, largest {max(ratios):.2f}")


if __name__ == "__main__":
    main()
