"""Copies between rows of a pool and states, each in one launch of the kernel of the family ``state_rows``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scan_registry.base.alignment import common_alignment
from scan_registry.dispatch import policy
from scan_registry.kernels.state_rows.spec import FAMILY, UNITS, RowsProblem
from scan_registry.ops.call import OBSERVERS, are_plain
from scan_registry.ops.launching import plan_cache
from scan_registry.runtime.loader import prepare

__all__ = ["gather", "rows_problem", "scatter"]


def gather(pool: Tensor, indices: Tensor, pad_slot: int) -> Tensor | None:
    """A copy of the rows of a pool (slots, …) that ``indices`` (rows,) name; None where no kernel on a GPU makes it. A row whose index
    is below zero, too large, or ``pad_slot`` is zeros."""
    if not _may_run(pool, indices):
        return None
    states = pool.new_empty((indices.shape[0], *pool.shape[1:]))
    return states if _copied(pool, states, indices, pad_slot, False) else None


def scatter(pool: Tensor, states: Tensor, indices: Tensor, pad_slot: int) -> bool:
    """Write ``states`` (rows, …), of the pool's dtype, to the rows of the pool that ``indices`` name, if a kernel on a GPU can; whether
    it has. A state whose index is below zero, too large, or ``pad_slot`` is not written."""
    if not _may_run(pool, states, indices):
        return False
    return _copied(pool, states.contiguous(), indices, pad_slot, True)


def _may_run(*tensors: Tensor) -> bool:
    """Whether a call runs on a GPU now, not in a trace, and no profiler, mode or transform observes torch's operators."""
    if torch.compiler.is_compiling() or not _on_gpu(tensors[0]):
        return False
    return are_plain(*tensors) and not any(observer() for observer in OBSERVERS)


def _copied(pool: Tensor, states: Tensor, indices: Tensor, pad_slot: int, scatters: bool) -> bool:
    tensors = pool, states, indices.contiguous()
    copied: bool = plan_cache.run(_plan, tensors, pad_slot, scatters)
    return copied


def _on_gpu(pool: Tensor) -> bool:
    return pool.is_cuda


def _plan(
    pool: Tensor, states: Tensor, indices: Tensor, pad_slot: int, scatters: bool
) -> Callable[..., bool]:
    problem = rows_problem(pool, states, indices, pad_slot, scatters)
    ready = None
    if problem is not None:
        ready = prepare(pool.device.index, FAMILY, problem, "auto", policy.lowest())
    if ready is None or ready.launch is None:
        return lambda *tensors: False
    run = ready.run

    def copy(pool: Tensor, states: Tensor, indices: Tensor) -> bool:
        run({"pool": pool, "states": states, "indices": indices})
        if scatters:
            torch.autograd.graph.increment_version(pool)
        return True

    return copy


def rows_problem(
    pool: Tensor, states: Tensor, indices: Tensor, pad_slot: int, scatters: bool
) -> RowsProblem | None:
    """What a copy poses; None if the rows of the pool lie as the kernel cannot read them."""
    if not states.numel() or not states.is_contiguous():
        return None
    runs = _runs(pool)
    if runs is None:
        return None
    run, stride, run_stride = runs
    size, slot_stride = pool.element_size(), pool.stride(0)
    alignment = common_alignment(
        [pool.data_ptr(), states.data_ptr(), *(size * n for n in (run, run_stride, slot_stride))]
    )
    # Elements that do not lie together are copied one by one.
    unit = next(
        (unit for unit in UNITS if alignment >= unit and (stride == 1 or unit == size)), None
    )
    if unit is None:
        return None
    return RowsProblem(
        rows=indices.shape[0],
        units=states[0].numel() * size // unit,
        unit=unit,
        run=run * size // unit,
        stride=stride,
        run_stride=run_stride * size // unit,
        slots=pool.shape[0],
        slot_stride=slot_stride * size // unit,
        scatter=scatters,
        pad_slot=pad_slot,
        wide_indices=indices.dtype == torch.int64,
    )


def _runs(pool: Tensor) -> tuple[int, int, int] | None:
    """How many elements of a row are at one distance, that distance, and how far it is from one such run to the next; None if
    these distances differ."""
    dimensions: list[tuple[int, int]] = []  # of a row, as few as there can be
    for count, stride in zip(pool.shape[1:], pool.stride()[1:], strict=True):
        if dimensions and dimensions[-1][1] == count * stride:
            dimensions[-1] = dimensions[-1][0] * count, stride
        elif count > 1:
            dimensions.append((count, stride))
    if len(dimensions) > 2:
        return None
    run, stride = dimensions.pop() if dimensions else (1, 1)
    return run, stride, dimensions[0][1] if dimensions else run * stride
