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
        if target is state and _is_readable(indices, 1, 2):
            _check_readers(indices, dst_indices, num_accepted, cu_seqlens, pad_slot)
    if _is_readable(num_accepted, 1) and len(num_accepted) and _is_readable(indices, 2):
        most, least = int(num_accepted.max()), int(num_accepted.min())
        if least < 0 or most > indices.shape[1]:
            raise ValueError(
                f"num_accepted_tokens has the number {least if least < 0 else most}; accepted are 0 to {indices.shape[1]}, "
                "as many as state_batch_indices has columns"
            )


def _check_readers(
    indices: Tensor, dst_indices: Tensor, num_accepted: Any, cu_seqlens: Any, pad_slot: int
) -> None:
    """Refuse to write to a slot that another sequence starts from: which comes first is not known."""
    firsts = _first_slots(indices, num_accepted)
    if len(firsts) != len(dst_indices):
        return
    readers: dict[int, set[int]] = {}
    for sequence, slot in enumerate(firsts):
        readers.setdefault(slot, set()).add(sequence)
    bounded = _is_readable(cu_seqlens, 1)
    for sequence in range(len(firsts)):
        bounds = cu_seqlens[sequence : sequence + 2] if bounded else None
        for slot in _used(dst_indices[sequence : sequence + 1], bounds).tolist():
            others = readers.get(slot, set()) - {sequence}
            if slot >= 0 and slot != pad_slot and others:
                raise ValueError(
                    f"dst_state_batch_indices has the number {slot} for sequence {sequence}, and sequence {min(others)} starts "
                    "from that slot; write to another slot, or to another pool, dst_state"
                )


def _first_slots(indices: Tensor, num_accepted: Any) -> list[int]:
    """The slot that each sequence starts from; none of them where the numbers of accepted tokens cannot be read."""
    if indices.dim() == 1:
        return list(indices.tolist())
    if not _is_readable(num_accepted, 1) or len(num_accepted) != len(indices):
        return []
    columns = (num_accepted.long() - 1).clamp(0, indices.shape[1] - 1)
    return list(indices.gather(1, columns.unsqueeze(1)).flatten().tolist())


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
