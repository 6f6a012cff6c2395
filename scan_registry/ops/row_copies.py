"""Copies between rows of a pool and states, each in one launch of the kernel of the family ``state_rows``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.alignment import common_alignment
from scan_registry.dispatch import policy
from scan_registry.kernels.state_rows.spec import FAMILY, UNITS, RowsProblem
from scan_registry.ops.call import OBSERVERS, are_plain
from scan_registry.ops.launching import plan_cache
from scan_registry.runtime.loader import prepare

__all__ = ["copy_rows", "rows_problem"]


def copy_rows(
    pool: Tensor, states: Tensor, indices: Tensor, pad_slot: int, *, scatter: bool
) -> bool:
    """Copy the pool's rows to ``states``, or the states to the pool's rows, if a kernel on a GPU can; whether it has.

    ``states`` lie without gaps, in the dtype of the pool. An index that is below zero or too large, or ``pad_slot``, stands for no
    row: states are zeros, or the state is not written.
    """
    if torch.compiler.is_compiling() or not _on_gpu(pool):
        return False
    if not are_plain(pool, states, indices) or any(observer() for observer in OBSERVERS):
        return False
    own = indices.contiguous()
    copied: bool = plan_cache.run(_plan, (pool, states, own), pad_slot, scatter)
    return copied


def _on_gpu(pool: Tensor) -> bool:
    return pool.is_cuda


def _plan(
    pool: Tensor, states: Tensor, indices: Tensor, pad_slot: int, scatter: bool
) -> Callable[..., bool]:
    problem = rows_problem(pool, states, indices, pad_slot, scatter)
    ready = None
    if problem is not None:
        ready = prepare(pool.device.index, FAMILY, problem, "auto", policy.lowest())
    if ready is None or ready.launch is None:
        return lambda *tensors: False
    run = ready.run

    def copy(pool: Tensor, states: Tensor, indices: Tensor) -> bool:
        run({"pool": pool, "states": states, "indices": indices})
        if scatter:
            torch.autograd.graph.increment_version(pool)
        return True

    return copy


def rows_problem(
    pool: Tensor, states: Tensor, indices: Tensor, pad_slot: int, scatter: bool
) -> RowsProblem | None:
    """What a copy poses; None if the rows of the pool lie as the kernel cannot read them."""
    if not states.numel() or not states.is_contiguous():
        return None
    runs = _runs(pool)
    if runs is None:
        return None
    run, run_stride = runs
    size, slot_stride = pool.element_size(), pool.stride(0)
    alignment = common_alignment(
        [pool.data_ptr(), states.data_ptr(), *(size * n for n in (run, run_stride, slot_stride))]
    )
    unit = next((unit for unit in UNITS if alignment >= unit), None)
    if unit is None:
        return None
    per_unit: dict[str, Any] = {
        "units": states[0].numel() * size // unit,
        "run": run * size // unit,
        "run_stride": run_stride * size // unit,
        "slot_stride": slot_stride * size // unit,
    }
    return RowsProblem(
        rows=indices.shape[0],
        unit=unit,
        slots=pool.shape[0],
        scatter=scatter,
        pad_slot=pad_slot,
        wide_indices=indices.dtype == torch.int64,
        **per_unit,
    )


def _runs(pool: Tensor) -> tuple[int, int] | None:
    """How many elements of a row lie together, and how far it is from one such run to the next; None if these distances
    differ."""
    sizes = [
        (n, stride) for n, stride in zip(pool.shape[1:], pool.stride()[1:], strict=True) if n > 1
    ]
    run = 1
    while sizes and sizes[-1][1] == run:
        run *= sizes.pop()[0]
    if not sizes:
        return run, run
    count, run_stride = sizes.pop()
    while sizes and sizes[-1][1] == count * run_stride:
        count *= sizes.pop()[0]
    return None if sizes else (run, run_stride)
