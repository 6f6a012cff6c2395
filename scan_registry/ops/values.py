"""Checks of tensor values: decreasing bounds, invalid row indices, numbers out of range.

Values on the CPU are checked in every call, before anything is written. To read values on a GPU, the CPU has to wait for it, so
these are checked only under ``SCAN_REGISTRY_DEBUG``. Values that Python cannot read are not checked: see ``has_values``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from scan_registry.base.environment import flag

_INTEGERS = (torch.int32, torch.int64)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state


def are_checked(tensor: Tensor) -> bool:
    """Whether the values of this tensor are checked."""
    if torch.compiler.is_compiling() or tensor.layout != torch.strided or tensor.is_nested:
        return False
    checked = tensor.is_cpu or (tensor.is_cuda and flag("SCAN_REGISTRY_DEBUG"))
    return checked and has_values(tensor) and not _is_traced(tensor)


def has_values(tensor: Tensor) -> bool:
    """Whether Python can read the values: not under torch.compile or ``torch.vmap``, and not of meta or fake
    tensors."""
    if torch.compiler.is_compiling() or type(tensor) not in (Tensor, Parameter) or tensor.is_meta:
        return False
    return not is_mapped(tensor)


def is_mapped(tensor: Tensor) -> bool:
    """Whether ``torch.vmap`` maps over it, at any level: its values are then no numbers that Python can see."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return torch._C._functorch.is_batchedtensor(tensor)


def _is_traced(tensor: Tensor) -> bool:
    """Whether a check would enter a graph that is being made: of ``torch.jit.trace``, ``make_fx``, or CUDA."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    if _tracing_state() is not None:
        return True
    modes = torch._C._TorchDispatchModeKey
    return bool(_dispatch_modes()) and any(
        torch._C._get_dispatch_mode(key) is not None for key in (modes.PROXY, modes.FAKE)
    )


def check_bounds(
    cu_seqlens: Tensor, time: int, whole: bool = True, *, anywhere: bool = False
) -> None:
    """``ValueError`` unless the bounds rise from 0 to ``time``; with ``whole=False`` they may end earlier, and with ``anywhere``
    also begin later."""
    if not are_checked(cu_seqlens):
        return
    rises = bool((cu_seqlens[1:] >= cu_seqlens[:-1]).all())
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    begins = first >= 0 if anywhere else first == 0
    ends = last == time if whole else last <= time
    if not (rises and begins and ends):
        how = _fall(cu_seqlens) if not rises else f"runs from {first} to {last}"
        start, most = "in the range " if anywhere else "", "" if whole or anywhere else "at most "
        raise ValueError(
            f"cu_seqlens {how}; it must rise {start}from 0 to {most}the {time} steps of the time dimension"
        )


def _fall(bounds: Tensor) -> str:
    """Where the bounds fall first, in words."""
    place = int((bounds[1:] < bounds[:-1]).nonzero()[0])
    before, after = bounds[place : place + 2].tolist()
    return f"falls from {before} to {after} at index {place + 1}"


def as_int32(seq_idx: Tensor) -> Tensor:
    """``seq_idx`` in int32. ``ValueError`` for numbers that are none of that, where values are checked."""
    narrow = seq_idx.to(torch.int32)
    if narrow.dtype != seq_idx.dtype and are_checked(seq_idx):
        beyond = seq_idx[narrow != seq_idx]
        if len(beyond):
            raise ValueError(
                f"seq_idx has the number {int(beyond[0])}; accepted are those of int32"
            )
    return narrow


def _are_indices(rows: Any) -> bool:
    """Whether these are indices whose values are to be checked."""
    if not isinstance(rows, Tensor) or rows.dtype not in _INTEGERS or rows.dim() != 1:
        return False
    return are_checked(rows)


def check_rows(
    name: str,
    rows: Any,
    state: Any,
    pad_slot: int = -1,
    *,
    unique: bool = True,
    pool: str = "the state",
) -> None:
    """Refuse row indices that are out of range or, if they have to be ``unique``, occur twice. A negative index stands for no
    row, and so does ``pad_slot``. ``pool`` is what the error calls the state. Arguments of the wrong type or shape are left to
    other checks."""
    if not isinstance(state, Tensor) or not state.dim() or not _are_indices(rows):
        return
    chosen = [row for row in rows.tolist() if row >= 0 and row != pad_slot]
    count = state.shape[0]
    if not chosen:
        return
    once, pad = ", each once" * unique, f" and {pad_slot}" * (pad_slot >= 0)
    accepted = f"accepted are 0 to {count - 1}{once}, and numbers below zero{pad} for no row"
    if (most := max(chosen)) >= count:
        raise ValueError(f"{name} has the number {most}, and {pool} {count} rows; {accepted}")
    if unique and len({*chosen}) < len(chosen):
        twice = next(row for row in chosen if chosen.count(row) > 1)
        raise ValueError(f"{name} has the number {twice} more than once; {accepted}")


def check_range(name: str, tensor: Any, least: float, most: float, slack: float = 0.0) -> None:
    """Refuse a value that is NaN, or further than ``slack`` from the range. Arguments that are not tensors of real numbers
    are left to other checks."""
    if not isinstance(tensor, Tensor) or not are_checked(tensor):
        return
    if tensor.is_complex() or not tensor.numel():
        return
    low, high = (bound.item() for bound in torch.aminmax(tensor.detach()))
    if not (least - slack <= low and high <= most + slack):
        wrong = high if least - slack <= low else low
        raise ValueError(
            f"{name} has the value {wrong}; accepted are values from {least} to {most}"
        )
