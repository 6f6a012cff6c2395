"""The gradient of gates that time steps share, from the sums over time that a backward kernel leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch.select import NoKernelError
from scan_registry.kernels.linear_scan.gates_sum import GatesSumProblem, problem_of
from scan_registry.kernels.linear_scan.op.problems import StateLayout

#: More sums than these are added up by torch in two steps.
_MANY_SUMS = 2**18


def total_problems(
    gates: Tensor, layout: StateLayout, pieces: int, dim: int
) -> tuple[GatesSumProblem, ...]:
    """Those that kernels solve one after the other, of ``pieces`` sums for each state, as ``layout.sums`` makes room for them, and
    gates like ``gates``; empty if the dimensions do not fold."""
    sums = layout.each_sum(torch.empty((pieces, math.prod(layout.shape)), device="meta"))
    if not layout.packed:
        sums = sums.unsqueeze(dim if dim < 0 else dim + 1)
    dtype, of_gates = (str(of).removeprefix("torch.") for of in (layout.dtype, gates.dtype))
    problem = problem_of(sums.shape, sums.stride(), gates.shape, dtype, of_gates)
    return () if problem is None else problem.cut()


def plan_total(
    gates: Tensor,
    layout: StateLayout,
    pieces: int,
    dim: int,
    runner: Callable[[GatesSumProblem], Any] | None,
) -> Callable[[Tensor], Tensor]:
    """A function of the sums of ``total_problems`` that returns the gradient of gates like ``gates``. Kernels that ``runner``
    prepares compute it, or torch where there are none."""
    shape, narrow = gates.shape, gates.dtype

    def by_torch(sums: Tensor) -> Tensor:
        return _sum_to(shape, layout.each_sum(sums), dim, layout.packed).to(narrow)

    problems = () if runner is None else total_problems(gates, layout, pieces, dim)
    if runner is None or not problems:
        return by_torch
    try:
        runs = [runner(of) for of in problems]
    except NoKernelError:
        return by_torch
    totals = problems[0].totals

    def by_kernels(sums: Tensor) -> Tensor:
        for of, run in zip(problems[:-1], runs[:-1], strict=True):
            parts = sums.new_empty((of.parts, totals))
            run({"sums": sums, "gates_grad": parts})
            sums = parts
        gates_grad = sums.new_empty(shape, dtype=narrow)
        runs[-1]({"sums": sums, "gates_grad": gates_grad})
        return gates_grad

    return by_kernels


def _sum_to(shape: tuple[int, ...], sums: Tensor, dim: int, packed: bool) -> Tensor:
    """The total of sums that lie as states do, over sequences and whatever else gates of a shape are broadcast along: one
    reduction, but for many sums, of which it would take twice their memory: first over what lies apart."""
    if sums.numel() > _MANY_SUMS:
        sums = sums.sum(0, keepdim=True)
    if not packed:
        sums = sums.unsqueeze(dim if dim < 0 else dim + 1)
    missing = sums.dim() - len(shape)  # the first dimension, and those that the gates lack
    axes = [*range(missing), *(d + missing for d, size in enumerate(shape) if size == 1)]
    return sums.sum(axes).reshape(shape).contiguous()
