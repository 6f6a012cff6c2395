"""One selective scan over the ranks of torchrun, in milliseconds, beside one rank with the whole sequence.

    torchrun --nproc-per-node 2 tools/selective_scan_ranks.py [--shape 1,5120,131072] [--softplus] [--device cpu]

It times ``scan_registry.distributed.selective_scan``, forward and both passes, on GPUs over NCCL, or with ``--device cpu`` over gloo. The shape is batch, channels and time of the whole sequence; there are 16 states
to a channel. A time is the median of ``--rounds`` calls, each from when all ranks are ready until the last one is done. The
first rank prints. It also prints the largest relative error of a rank's output. Every rank computes the whole sequence to
compare, so on CPUs that share cores the time of one rank is too long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from scan_registry import distributed, selective_scan

STATES = 16


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median over rounds, of the slowest rank."""
    times = []
    for number in range(rounds + 2):
        synchronise(device)
        dist.barrier()
        start = time.perf_counter()
        call()
        synchronise(device)
        taken = torch.tensor([1e3 * (time.perf_counter() - start)], device=device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        if number >= 2:  # the first calls load kernels and agree on the call's kind
            times.append(taken.item())
    return statistics.median(times)


def drawn(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """u, Δ, A, B, C and D of the whole sequence, the same on every rank."""
    batch, channels, steps = shape
    torch.manual_seed(0)
    delta = torch.rand(shape, device=device).mul_(0.5)
    sizes = (batch, STATES, steps)
    return [
        torch.randn(shape, device=device, dtype=dtype),
        delta.to(dtype),
        -torch.rand(channels, STATES, device=device) - 0.1,
        torch.randn(sizes, device=device, dtype=dtype),
        torch.randn(sizes, device=device, dtype=dtype),
        torch.randn(channels, device=device),
    ]


def calls_of(
    scan: Callable[..., Tensor], given: Sequence[Tensor], bias: Tensor | None
) -> tuple[Callable[[], Tensor], Callable[[], object]]:
    """The forward pass alone, and both passes."""
    leaves = [each.detach().clone().requires_grad_() for each in given]
    grad = torch.randn_like(leaves[0])

    def whole() -> Tensor:
        return scan(*leaves, None, bias, bias is not None)

    def forward() -> Tensor:
        with torch.no_grad():
            return whole()

    return forward, lambda: torch.autograd.grad(whole(), leaves, grad)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One selective scan over the ranks of torchrun.")
    parser.add_argument("--shape", default="1,5120,131072", help="batch,channels,time")
    parser.add_argument("--softplus", action="store_true", help="of Δ, with a bias")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(words)
    sizes = given.shape.split(",")
    shape = [int(word) for word in sizes if word.isdecimal()]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not len(shape) == len(sizes) == 3 or min(shape) < 1 or shape[2] % ranks:
        parser.error(
            f"--shape is {given.shape}; expected three sizes, and a time that {ranks} divides"
        )
    on_gpu = given.device == "cuda"
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=ranks)
    try:
        inputs = drawn(shape, device, torch.bfloat16 if on_gpu else torch.float32)
        bias = torch.randn(shape[1], device=device) if given.softplus else None
        width = shape[2] // ranks
        own = slice(rank * width, (rank + 1) * width)
        parts = [x[..., own].contiguous() if n in (0, 1, 3, 4) else x for n, x in enumerate(inputs)]
        alone = calls_of(selective_scan, inputs, bias)
        expected = alone[0]()[..., own].float()
        one = [milliseconds(call, device, given.rounds) for call in alone]
        lines = [f"one rank: forward {one[0]:.3f}, both passes {one[1]:.3f}"]
        calls = calls_of(distributed.selective_scan, parts, bias)
        apart = (calls[0]().float() - expected).norm() / expected.norm()
        dist.all_reduce(apart, op=dist.ReduceOp.MAX)
        times = [milliseconds(call, device, given.rounds) for call in calls]
        forward, both = (f"{a:.3f} ({a / b:.2f} of one)" for a, b in zip(times, one, strict=True))
        lines.append(f"all ranks: forward {forward}, both passes {both}, error {apart:.1e}")
    finally:
        dist.destroy_process_group()
    if rank == 0:
        print(f"{ranks} ranks, {given.device}, {given.shape}, milliseconds", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
