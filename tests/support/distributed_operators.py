"""What ranks do in tests of gated and selective scans: each takes its part, and compares with one process over the whole."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from distributed_cases import close, summed
from torch import Tensor

from scan_registry import distributed, gated_scan, selective_scan
from scan_registry.distributed import opening, selective_run
from scan_registry.distributed.group import resolve
from scan_registry.kernels.gated_scan.kinds import KINDS


def gated(rank: int, ranks: int, group: Any, kind: str, dim: int, packed: bool) -> None:
    """``gated_scan`` with resets, initial and final states, against one process."""
    torch.manual_seed(5)
    lengths = [(3, 0, 4)[each % 3] for each in range(ranks)]
    time, begin = sum(lengths), sum(lengths[:rank])
    shape = (2, 3, time) if dim == -1 else (2, time, 3)
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in KINDS[kind].inputs]
    values = [torch.rand(3, dtype=torch.float64) for _ in KINDS[kind].parameters]
    reset = torch.rand(2, time) < 0.2
    bounds = torch.tensor([0, time // 3, time // 3, time]) if packed else None
    initial = torch.randn((2, 3) if not packed else (2, 3, 3), dtype=torch.float64)
    weights = torch.randn(shape, dtype=torch.float64)
    how: Any = {"dim": dim, "cu_seqlens": bounds, "return_final_state": True}

    def cut(x: Tensor, along: int = dim) -> Tensor:
        return x.narrow(along, begin, lengths[rank]).clone()

    leaves = [x.clone().requires_grad_() for x in (*inputs, *values, initial)]
    states, last = gated_scan(kind, *leaves[:-1], initial_state=leaves[-1], reset=reset, **how)
    wanted = torch.autograd.grad((states * weights).sum() + last.square().sum(), leaves)
    for known in (False, True):  # the second call goes by the plan of the first, as over NCCL
        with patch.object(opening, "_reading_waits", lambda place, known=known: known):
            mine = [cut(x).requires_grad_() for x in inputs]
            mine += [x.clone().requires_grad_() for x in (*values, initial)]
            here, end = distributed.gated_scan(
                kind, *mine[:-1], initial_state=mine[-1], reset=cut(reset, 1), group=group, **how
            )
            close(here, cut(states))
            close(end, last)
            loss = (here * cut(weights)).sum() + (end.square().sum() if rank == 0 else 0)
            for place, (grad, of_whole) in enumerate(
                zip(torch.autograd.grad(loss, mine), wanted, strict=True)
            ):
                if place < len(inputs):
                    close(grad, cut(of_whole))
                else:
                    close(summed(grad, group), of_whole)


def selective(
    rank: int, ranks: int, group: Any, groups: tuple[int, int], packed: bool, every: bool
) -> None:
    """``selective_scan``, with all that it takes or the least, against one process."""
    torch.manual_seed(7)
    lengths = [(3, 0, 4)[each % 3] for each in range(ranks)]
    time, begin = sum(lengths), sum(lengths[:rank])
    batch, channels, states = 2, 24, 3

    def draw(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64)

    def projection(count: int) -> Tensor:
        return draw(channels, states) if count == 0 else draw(batch, count, states, time)

    bounds = torch.tensor([0, time // 3, time // 3, time]) if packed else None
    given: list[Any] = [draw(batch, channels, time), draw(batch, channels, time)]
    given += [-torch.rand(channels, states, dtype=torch.float64), *map(projection, groups)]
    between = (3,) if packed else ()
    optional = [draw(channels), draw(batch, channels, time), draw(channels)]
    given += optional if every else [None] * 3
    initial = draw(batch, *between, channels, states) if every else None
    weights, last_weights = draw(batch, channels, time), draw(batch, *between, channels, states)
    timed = (0, 1, *(3 + n for n, count in enumerate(groups) if count), 6)
    how: Any = {"cu_seqlens": bounds, "return_final_state": True}

    def cut(x: Tensor) -> Tensor:
        return x.narrow(-1, begin, lengths[rank]).clone()

    def with_gradient(x: Any) -> Any:
        return None if x is None else x.clone().requires_grad_()

    leaves = [with_gradient(x) for x in (*given, initial)]
    out, last = selective_scan(*leaves[:8], True, leaves[8], **how)
    loss = (out * weights).sum() + (last * last_weights).sum()
    wanted = torch.autograd.grad(loss, [x for x in leaves if x is not None])
    # The second call goes by the plan of the first, as over NCCL; the third is in one piece.
    for known, most in ((False, 64), (True, 64), (True, 1)):
        of_whole = iter(wanted)
        waits = patch.object(opening, "_reading_waits", lambda place, known=known: known)
        with waits, patch.object(selective_run, "MOST", most):
            if most == 1:
                resolve(group).session.plans.clear()
            mine = [
                with_gradient(cut(x) if n in timed and x is not None else x)
                for n, x in enumerate(given)
            ]
            mine.append(with_gradient(initial))
            here, end = distributed.selective_scan(*mine[:8], True, mine[8], group=group, **how)
            close(here, cut(out))
            close(end, last)
            loss = (here * cut(weights)).sum() + (end * last_weights).sum() / ranks
            found = iter(torch.autograd.grad(loss, [x for x in mine if x is not None]))
            for number, x in enumerate(mine):
                if x is not None and number in timed:
                    close(next(found), cut(next(of_whole)))
                elif x is not None:
                    close(summed(next(found), group), next(of_whole))
