"""Race threads over scans and recurrent networks on few CUDA streams, and compare with calls made alone.

    python tests/stress/race.py [--seconds 30] [--threads 8] [--device cpu]

Four networks that run step by step, and four scans. Each thread has its own input for each of them, and half of the threads
launch on each of two streams, without waiting for one another. Each thread runs one after the other in an order of its own,
forwards and backwards, and compares the results bit for bit with those that one thread computed alone before. The exit status is
1 after a difference, an error or a leak: all results are freed, and yet more memory is allocated than in the first third of the
race. Memory pools apart from torch's usual one do not count: in them is what cuBLAS works in while a CUDA graph runs, at most once
for each thread and stream.
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


def job(function: Callable[[Tensor], Tensor]) -> Job:
    """The result of a function, and its input's gradient."""

    def run(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = function(leaf)
        out.sum().backward()
        assert leaf.grad is not None
        return [out.detach(), leaf.grad]

    return run


def make_race(threads: int, device: str) -> Race:
    """Inputs, and the expected results."""
    wide = 1024 if device == "cuda" else 32
    dtypes = torch.float32, torch.bfloat16 if device == "cuda" else torch.float64
    torch.manual_seed(0)
    jobs = []
    for number, kind in enumerate((nn.LSTM, nn.GRU, nn.RNN, nn.SLSTM)):
        module = kind(32, wide, device=device, dtype=dtypes[number % 2])
        module.requires_grad_(False)  # threads would add to the same gradients
        if device == "cuda":
            module.backend = "cuda_alternating"
        jobs.append(job(lambda x, module=module: module(x)[0]))
    for dim in (1, 2):
        for reverse in (False, True):
            how = {"dim": dim, "reverse": reverse}
            jobs.append(job(lambda x, how=how: linear_scan(x.detach().sigmoid(), x, **how)))
    shapes = [(70, 3, 32)] * 4 + [(4, 300, 257)] * 4
    inputs = [
        [torch.randn(s, device=device, dtype=dtypes[n % 2]) for n, s in enumerate(shapes)]
        for _ in range(threads)
    ]
    expected = [[run(x) for run, x in zip(jobs, own, strict=True)] for own in inputs]
    return Race(jobs, inputs, expected)


def run_thread(race: Race, number: int, stream: torch.cuda.Stream | None) -> None:
    """Run jobs until the thread is told to stop, or a call fails."""
    order, jobs = random.Random(number), [*range(len(race.jobs))]
    try:
        with torch.cuda.stream(stream):
            while not race.stop.is_set():
                order.shuffle(jobs)
                for name in jobs:
                    outputs = race.jobs[name](race.inputs[number][name])
                    # The whole device is never waited for: CUDA refuses that while a graph is recorded.
                    for out, right in zip(outputs, race.expected[number][name], strict=True):
                        if not torch.equal(out, right):
                            error = float((out - right).abs().max())
                            race.problems.append(f"thread {number}, job {name}: {error:.3g} off")
                    race.rounds += 1
    except Exception as error:
        race.problems.append(f"thread {number}: {type(error).__name__}: {error}")


def allocated(device: str) -> int:
    """Bytes of tensors in torch's usual memory pool."""
    segments = torch.cuda.memory_snapshot() if device == "cuda" else []
    return sum(s["allocated_size"] for s in segments if s["segment_pool_id"] == (0, 0))


def run(seconds: float, threads: int, device: str) -> Race:
    """The finished race; memory that grew is one of its problems."""
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
    early = 0
    for _ in range(10):
        time.sleep(seconds / 30)
        early = max(early, allocated(device))
    time.sleep(2 * seconds / 3)
    race.stop.set()
    for runner in runners:
        runner.join()
    if (late := allocated(device)) > early + SLACK:
        race.problems.append(f"memory grows: {early / 1e6:.1f} MB early, {late / 1e6:.1f} MB late")
    return race


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    race = run(options.seconds, options.threads, options.device)
    print(f"{race.rounds} calls with gradients in {options.threads} threads")
    print("\n".join(race.problems[:20]) or "no difference, no error")
    return 1 if race.problems else 0


if __name__ == "__main__":
    sys.exit(main())
