"""What ranks do in tests of Mamba-2's scan: each takes its part of time, and compares with one process over the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from distributed_cases import check_outputs, compare_parts, raised, reading_waits
from ssd_problems import NAMES, draw

from scan_registry import distributed, ssd_scan
from scan_registry.distributed.group import resolve
from scan_registry.kernels.ssd_scan.op import distributed as dual

#: The tensors that are cut along time.
TIMED = ("x", "dt", "B", "C", "z")


@dataclass(frozen=True)
class Case:
    """A scan of all ranks' steps.

    lengths  of the ranks' parts, in turn if there are more ranks
    packed   whether three sequences are packed, of which one is empty
    wide_D   whether ``D`` has a number for each element of a head
    without  tensors that are left out
    options  other arguments
    """

    lengths: tuple[int, ...] = (3, 0, 4)
    packed: bool = False
    wide_D: bool = False
    without: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"


def compare(rank: int, ranks: int, group: Any, case: Case) -> None:
    """Outputs, final states and gradients against those of one process."""
    lengths = [case.lengths[number % len(case.lengths)] for number in range(ranks)]
    time, dtype = sum(lengths), getattr(torch, case.dtype)
    problem = draw(
        time=time, sequences=3 if case.packed else 0, dtype=dtype, wide_D=case.wide_D, seed=ranks
    )
    tensors = {name: problem[name] for name in NAMES if name not in case.without}
    timed = {name: 1 for name in TIMED if name in tensors}
    bounds = torch.tensor([0, time // 3, time // 3, time]) if case.packed else None
    how: Any = {"cu_seqlens": bounds, "return_final_state": True, **case.options}
    resolve(group).session.plans.clear()
    resolve(group).session.agreed.clear()
    calls = partial(ssd_scan, **how), partial(distributed.ssd_scan, group=group, **how)
    # Summaries add up few steps at a time, so that a part has several such ranges.
    with patch.object(dual, "_STEPS", 2):
        contexts = [*map(reading_waits, (False, True))]
        compare_parts(rank, ranks, group, lengths, calls, tensors, timed, 1, contexts)


def refused(rank: int, ranks: int, group: Any, changes: dict[str, Any]) -> list[str]:
    """What a call says whose arguments are changed on the last rank, and what the next call says."""
    arguments = {**draw(seed=1), "group": group}
    changed = {**arguments, **changes} if rank == ranks - 1 else arguments
    first = raised(lambda: distributed.ssd_scan(**changed))
    return [first, raised(lambda: distributed.ssd_scan(**arguments))]


def differentiated_twice(rank: int, ranks: int, group: Any) -> str:
    problem = draw(seed=1)
    x = problem.pop("x").requires_grad_()
    out = distributed.ssd_scan(x, **problem, group=group)
    return raised(lambda: torch.autograd.grad(out.sum(), x, create_graph=True))


def changed_in_place(rank: int, ranks: int, group: Any) -> None:
    """What is returned can be changed in place, and what is kept for the backward pass keeps no more memory than it has."""
    problem = draw(seed=1)
    del problem["z"]  # whose product autograd keeps
    x = problem.pop("x").requires_grad_()
    out, last = distributed.ssd_scan(x, **problem, return_final_state=True, group=group)
    check_outputs(out, last, x)
