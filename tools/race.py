"""Race threads over scans and recurrent networks on few CUDA streams, and compare with calls made alone.

    python tools/race.py [--seconds 30] [--threads 8] [--device cpu]

Four networks that run step by step, and four scans. Each thread has its own input for each of them, and
half of the threads launch on each of two streams, without waiting for one another. Each runs one after the
other in an order of its own, forwards and backwards, and compares the results bit for bit with those that
one thread computed alone before. The exit status is 1 after a difference, an error or a leak: all results are freed, and yet
more memory is allocated than in the first third of the race. Memory pools apart from torch's usual one do not count: in them
is what cuBLAS works in while a CUDA graph runs, at most once for each thread and stream.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scan_registry import linear_scan, nn

STREAMS = 2
#: By how many bytes the memory may grow: buffers that a thread or a stream has kept since its first call of a kind.
SLACK = 64 << 20

Job = Callable[[Tensor], list[Tensor]]


@dataclass
class Race:
    """What the threads share."""

    jobs: list[Job]
    inputs: list[list[Tensor]]  # of each thread, for each job
    expected: list[list[list[Tensor]]]
    rounds: int = 0
    problems: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)


def network_job(module: torch.nn.Module) -> Job:
    """h, and the input's gradient; parameters get none, as threads would add to the same ones."""
    module.requires_grad_(False)

    def run(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = module(leaf)[0]
        out.sum().backward()
        assert leaf.grad is not None
        return [out.detach(), leaf.grad]

    return run


def scan_job(dim: int, reverse: bool) -> Job:
    """States, and the tokens' gradient."""

    def run(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = linear_scan(x.sigmoid(), leaf, dim=dim, reverse=reverse)
        out.sum().backward()
        assert leaf.grad is not None
        return [out.detach(), leaf.grad]

    return run


def make_race(threads: int, device: str) -> Race:
    """Inputs, and the expected results."""
    wide = 1024 if device == "cuda" else 32
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32, torch.float64)
    torch.manual_seed(0)
    modules = [
        nn.LSTM(32, wide, device=device, dtype=dtypes[0]),
        nn.GRU(32, wide, device=device, dtype=dtypes[1]),
        nn.RNN(32, wide, device=device, dtype=dtypes[0]),
        nn.SLSTM(32, wide, device=device, dtype=dtypes[1]),
    ]
    if device == "cuda":
        for module in modules:
            module.backend = "cuda_alternating"  # type: ignore[assignment]
    jobs = [
        *map(network_job, modules),
        *(scan_job(dim, reverse) for dim in (1, 2) for reverse in (False, True)),
    ]
    shapes = [(70, 3, 32)] * 4 + [(4, 300, 257)] * 4
    kinds = [dtypes[0], dtypes[1]] * 4
    inputs = [
        [torch.randn(s, device=device, dtype=d) for s, d in zip(shapes, kinds, strict=True)]
        for _ in range(threads)
    ]
    expected = [[job(x) for job, x in zip(jobs, own, strict=True)] for own in inputs]
    return Race(jobs, inputs, expected)


def run_thread(race: Race, number: int, stream: torch.cuda.Stream | None) -> None:
    """Run jobs until the thread is told to stop, or a result is wrong."""
    order = random.Random(number)
    jobs = [*range(len(race.jobs))]
    try:
        with torch.cuda.stream(stream):
            while not race.stop.is_set():
                order.shuffle(jobs)
                for job in jobs:
                    found = race.jobs[job](race.inputs[number][job])
                    # The whole device is never waited for: CUDA refuses that while a graph is recorded.
                    for out, right in zip(found, race.expected[number][job], strict=True):
                        if not torch.equal(out, right):
                            error = float((out - right).abs().max())
                            race.problems.append(f"thread {number}, job {job}: {error:.3g} off")
                    race.rounds += 1
    except Exception as error:
        race.problems.append(f"thread {number}: {type(error).__name__}: {error}")


def allocated() -> int:
    """Bytes of tensors in torch's usual memory pool."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["allocated_size"] for s in segments if s["segment_pool_id"] == (0, 0))


def run(seconds: float, threads: int, device: str) -> tuple[Race, list[int]]:
    """The finished race, and allocated bytes: ten samples from its first third, and one after it."""
    race = make_race(threads, device)
    streams: list[torch.cuda.Stream | None] = [None]
    if device == "cuda":
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    runners = [
        threading.Thread(target=run_thread, args=(race, n, streams[n % len(streams)]))
        for n in range(threads)
    ]
    for runner in runners:
        runner.start()
    used = []
    for _ in range(10):
        time.sleep(seconds / 30)
        used.append(allocated() if device == "cuda" else 0)
    time.sleep(2 * seconds / 3)
    race.stop.set()
    for runner in runners:
        runner.join()
    return race, [*used, allocated() if device == "cuda" else 0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    race, used = run(options.seconds, options.threads, options.device)
    *early, late = used
    print(
        f"{race.rounds} calls with gradients in {options.threads} threads; allocated memory at most "
        f"{max(early) / 1e6:.1f} MB in the first third, {late / 1e6:.1f} MB afterwards"
    )
    for problem in race.problems[:20]:
        print(problem)
    if late > max(early) + SLACK:
        race.problems.append("memory grows")
        print("memory grows")
    print("failed" if race.problems else "no difference, no error")
    return 1 if race.problems else 0


if __name__ == "__main__":
    sys.exit(main())
