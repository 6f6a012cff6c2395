"""What each rank does, under torchrun, that compares scans over all ranks' GPUs with one GPU's: NCCL, or gloo on the CPU.

    torchrun --nproc-per-node 2 tests/support/nccl_ranks.py

The first rank prints a line for each case, with relative errors of the states, the final state and each gradient.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scan_registry import distributed, linear_scan

#: Largest ‖found − wanted‖ / ‖wanted‖. A state that did not arrive makes ten times as much or more.
LIMIT = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 1e-3}


class Case(NamedTuple):
    shape: tuple[int, int, int]
    dim: int
    dtype: str
    parts: str = "even"
    reverse: bool = False
    state: bool = False
    packed: bool = False


def cases() -> Iterator[Case]:
    for dtype in LIMIT:
        yield Case((2, 4096, 768), 1, dtype)
        yield Case((2, 4001, 640), 1, dtype, "uneven", reverse=True, state=True)
    yield Case((3, 200, 5003), 2, "float32", "uneven", state=True)
    yield Case((3, 200, 5003), 2, "bfloat16", reverse=True, state=True)
    yield Case((1, 1 << 17, 1024), 1, "bfloat16")
    yield Case((1, 3000, 512), 1, "float32", "empty", state=True)
    yield Case((1, 3000, 512), 1, "float32", "uneven", state=True, packed=True)
    yield Case((1, 3000, 512), 1, "bfloat16", reverse=True, state=True, packed=True)


def steps(case: Case, ranks: int) -> list[int]:
    """Of each rank."""
    time = case.shape[case.dim]
    if case.parts == "empty":
        return [time] + [0] * (ranks - 1)
    first = time // (3 if case.parts == "uneven" else ranks)
    rest, more = divmod(time - first, max(1, ranks - 1))
    return [first] + [rest + (rank < more) for rank in range(ranks - 1)]


def errors(case: Case, schedule: str, device: torch.device) -> list[float]:
    """The largest of all ranks, of the states, the final state and the gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    dtype = getattr(torch, case.dtype)
    state_shape = [*case.shape]
    time, bounds = state_shape.pop(case.dim), None
    if case.packed:
        bounds = torch.tensor([0, time // 5, time // 5, time * 4 // 7, time], device=device)
        state_shape.insert(case.dim, 4)
    compute = torch.float64 if case.dtype == "float64" else torch.float32
    gates = (torch.randn(case.shape, device=device) + 4).sigmoid().to(dtype)  # states last
    tokens, grad = (torch.randn(case.shape, device=device).to(dtype) for _ in range(2))
    initial, last_grad = (torch.randn(state_shape, device=device).to(compute) for _ in range(2))

    def run(scan: Any, sequences: list[Tensor], last_grad: Tensor, **more: Any) -> list[Tensor]:
        given = [*sequences[:2], *([initial] if case.state else [])]
        inputs = [each.detach().requires_grad_() for each in given]
        how = {"dim": case.dim, "reverse": case.reverse, "cu_seqlens": bounds, **more}
        states, last = scan(*inputs, return_final_state=True, **how)
        grads = torch.autograd.grad([states, last], inputs, [sequences[2], last_grad])
        return [states.detach(), last.detach(), *grads]

    parts = steps(case, ranks)
    begin, count = sum(parts[:rank]), parts[rank]

    def cut(x: Tensor) -> Tensor:
        return x.narrow(case.dim, begin, count)

    mine = [cut(each).contiguous() for each in (gates, tokens, grad)]
    # Every rank has the final state, and a part of its loss.
    found = run(distributed.linear_scan, mine, last_grad / ranks, schedule=schedule)
    wanted = run(linear_scan, [gates, tokens, grad], last_grad)
    for grads in found[4:]:
        dist.all_reduce(grads)
    wanted = [cut(wanted[0]), wanted[1], cut(wanted[2]), cut(wanted[3]), *wanted[4:]]
    held = [
        float((a.double() - b.double()).norm() / b.double().norm()) if b.numel() else 0.0
        for a, b in zip(found, wanted, strict=True)
    ]
    largest = torch.tensor(held, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(each) for each in largest.tolist()]


def main() -> int:
    local, timeout = int(os.environ["LOCAL_RANK"]), timedelta(seconds=60)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    wrong = 0
    for case in cases():
        for schedule in ("reduce", "pass"):
            found = errors(case, schedule, device)
            right = max(found) <= LIMIT[case.dtype]
            wrong += not right
            if dist.get_rank() == 0:
                words = " ".join(f"{each:.1e}" for each in found)
                print("right" if right else "WRONG", schedule, *case, words, flush=True)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
