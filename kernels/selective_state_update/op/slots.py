"""Checks of the values of slots, of tokens accepted and of bounds, where values are checked: see ``ops.values``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.ops.values import are_checked, check_bounds, check_rows

_INTEGERS = (torch.int32, torch.int64)


def check_slots(
    state: Any,
    x: Any,
    indices: Any,
    dst_state: Any,
    dst_indices: Any,
    cu_seqlens: Any,
    num_accepted: Any,
    pad_slot: int,
) -> None:
    """``ValueError`` for a slot that is out of range, or to which two states would be written; for bounds that fall; and for more
    tokens accepted than there are slots. Arguments of the wrong type or shape are left to other checks."""
    if not isinstance(state, Tensor) or not isinstance(x, Tensor) or not state.dim():
        return
    if _is_readable(cu_seqlens, 1) and len(cu_seqlens) > 1 and x.dim():
        check_bounds(cu_seqlens, x.shape[0], whole=False)
    in_place = dst_indices is None
    if _is_readable(indices, 1, 2):
        check_rows(
            "state_batch_indices",
            _used(indices, cu_seqlens) if in_place else indices.flatten(),
            state,
            pad_slot,
            unique=in_place,
        )
    if _is_readable(dst_indices, 1, 2):
        target = state if dst_state is None else dst_state
        check_rows("dst_state_batch_indices", _used(dst_indices, cu_seqlens), target, pad_slot)
    if _is_readable(num_accepted, 1) and len(num_accepted) and _is_readable(indices, 2):
        most, least = int(num_accepted.max()), int(num_accepted.min())
        if least < 0 or most > indices.shape[1]:
            raise ValueError(
                f"num_accepted_tokens has the number {least if least < 0 else most}; accepted are 0 to {indices.shape[1]}, "
                "as many as state_batch_indices has columns"
            )


def _is_readable(tensor: Any, *ranks: int) -> bool:
    """Whether these are integers whose values are checked."""
    return (
        isinstance(tensor, Tensor)
        and tensor.dim() in ranks
        and tensor.dtype in _INTEGERS
        and are_checked(tensor)
    )


def _used(slots: Tensor, cu_seqlens: Any) -> Tensor:
    """The slots that states are written to: of several columns, those of tokens that a sequence has."""
    if slots.dim() == 1:
        return slots
    if not _is_readable(cu_seqlens, 1) or len(cu_seqlens) != len(slots) + 1:
        return slots[:, 0]
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    used = [row[:length] for row, length in zip(slots, lengths, strict=True)]
    return torch.cat(used) if used else slots.flatten()
