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

from scan_registry import distributed, linear_scan, selective_scan

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


def errors(case: Case, device: torch.device) -> list[float]:
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
    found = run(distributed.linear_scan, mine, last_grad / ranks)
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


# --- selective_scan ---------------------------------------------------------------------------

#: Of sums over time, and of states, in 16 bits by the GPU's approximation of 2^x.
SELECTIVE_LIMIT = {"float32": 1e-5, "bfloat16": 1e-2}
#: (batch, channels, time), dtype, which ranks have how many steps, and whether sequences are packed.
SELECTIVE: tuple[tuple[tuple[int, int, int], str, str, bool], ...] = (
    ((1, 96, 3001), "float32", "uneven", False),
    ((1, 640, 8192), "bfloat16", "even", False),  # in chunks
    ((2, 100, 600), "float32", "empty", False),
    ((2, 8448, 512), "bfloat16", "even", False),
    ((1, 96, 3001), "float32", "uneven", True),
    ((2, 640, 2000), "bfloat16", "even", True),
)


def selective_errors(
    shape: tuple[int, int, int], dtype_name: str, how_cut: str, packed: bool, device: torch.device
) -> list[float]:
    """The largest of all ranks, of the output, the final state and the gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    (batch, channels, time), dtype = shape, getattr(torch, dtype_name)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=device)

    u, z, grad = (draw(*shape).to(dtype) for _ in range(3))
    delta = (draw(*shape) - 3).to(dtype)
    B, C = (draw(batch, 1, 16, time).to(dtype) for _ in range(2))
    given = [u, delta, -8 * torch.rand(channels, 16, device=device) - 0.02, B, C, draw(channels)]
    bounds = [0, time // 5, time // 5, time * 4 // 7, time] if packed else None
    how = {"cu_seqlens": None if bounds is None else torch.tensor(bounds, device=device)}
    state = batch, *([4] if packed else []), channels, 16
    given += [z, 0.5 * torch.rand(channels, device=device), draw(*state)]
    last_grad, timed = draw(*state), (0, 1, 3, 4, 6)

    def run(scan: Any, given: list[Tensor], ends: list[Tensor]) -> list[Tensor]:
        inputs = [each.detach().requires_grad_() for each in given]
        made = scan(*inputs[:8], True, inputs[8], return_final_state=True, **how)
        return [*(x.detach() for x in made), *torch.autograd.grad(made, inputs, ends)]

    parts = steps(Case(shape, 2, dtype_name, how_cut), ranks)

    def cut(x: Tensor) -> Tensor:
        return x.narrow(-1, sum(parts[:rank]), parts[rank])

    mine = [cut(x).contiguous() if n in timed else x for n, x in enumerate(given)]
    ends = [cut(grad).contiguous(), last_grad / ranks]
    found = run(distributed.selective_scan, mine, ends)
    wanted = run(selective_scan, given, [grad, last_grad])
    held = []
    for place, (one, other) in enumerate(zip(found, wanted, strict=True), -2):
        right = cut(other) if place == -2 or place in timed else other
        if place >= 0 and place not in timed:
            dist.all_reduce(one)
        norm = float(right.double().norm())
        held.append(float((one.double() - right.double()).norm()) / norm if norm else 0.0)
    largest = torch.tensor(held, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(each) for each in largest.tolist()]


def reported(found: list[float], limit: float, *words: object) -> bool:
    """Whether the errors are too large. The first rank prints them."""
    right = max(found) <= limit
    if dist.get_rank() == 0:
        numbers = " ".join(f"{each:.1e}" for each in found)
        print("right" if right else "WRONG", *words, numbers, flush=True)
    return not right


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
        wrong += reported(errors(case, device), LIMIT[case.dtype], "linear", *case)
    for shape, dtype, *how in SELECTIVE:
        found = selective_errors(shape, dtype, *how, device)
        wrong += reported(found, SELECTIVE_LIMIT[dtype], "selective", *shape, dtype, *how)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
