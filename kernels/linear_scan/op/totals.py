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


def total_problem(
    gates: Tensor, layout: StateLayout, pieces: int, dim: int
) -> GatesSumProblem | None:
    """That of ``pieces`` sums for each state, as ``layout.sums`` makes room for them, and gates like ``gates``; None if the
    dimensions do not fold."""
    sums = layout.each_sum(torch.empty((pieces, math.prod(layout.shape)), device="meta"))
    if not layout.packed:
        sums = sums.unsqueeze(dim if dim < 0 else dim + 1)
    dtype, of_gates = (str(of).removeprefix("torch.") for of in (layout.dtype, gates.dtype))
    return problem_of(sums.shape, sums.stride(), gates.shape, dtype, of_gates)


def plan_total(
    gates: Tensor,
    layout: StateLayout,
    pieces: int,
    dim: int,
    runner: Callable[[GatesSumProblem], Any] | None,
) -> Callable[[Tensor], Tensor]:
    """A function of the sums of ``total_problem`` that returns the gradient of gates like ``gates``. A kernel that ``runner``
    prepares computes it, or torch where there is none."""
    shape, narrow = gates.shape, gates.dtype

    def by_torch(sums: Tensor) -> Tensor:
        return _sum_to(shape, layout.each_sum(sums), dim, layout.packed).to(narrow)

    problem = None if runner is None else total_problem(gates, layout, pieces, dim)
    if runner is None or problem is None:
        return by_torch
    try:
        run = runner(problem)
    except NoKernelError:
        return by_torch

    def by_kernel(sums: Tensor) -> Tensor:
        gates_grad = sums.new_empty(shape, dtype=narrow)
        run({"sums": sums, "gates_grad": gates_grad})
        return gates_grad

    return by_kernel


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
