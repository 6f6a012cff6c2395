"""Slots of a call: what ``pad_slot_id`` stands for, and checks of the values of slots, of tokens accepted and of bounds, where
values are checked: see ``ops.values``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.ops.checks import as_index
from scan_registry.ops.values import are_checked, check_bounds, check_rows, has_values

_INTEGERS = (torch.int32, torch.int64)


def without_pad_slot(dst_indices: Any, pad_slot_id: Any) -> tuple[Any, int]:
    """``dst_state_batch_indices`` and ``pad_slot_id`` of a call without ``state_batch_indices``, with -1 for ``pad_slot_id`` in both.

    The sequences of such a call start from the slots of their own numbers. Kernels and the reference compare ``pad_slot_id`` with
    these numbers, too, for which it does not count. Indices with a ``pad_slot_id`` are copied.
    """
    pad = as_index("pad_slot_id", pad_slot_id)
    if (
        pad >= 0
        and isinstance(dst_indices, Tensor)
        and dst_indices.dtype in _INTEGERS
        and dst_indices.layout == torch.strided
        and not dst_indices.is_nested
    ):
        dst_indices = dst_indices.masked_fill(dst_indices.long() == pad, -1)
    return dst_indices, -1


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
    """``ValueError`` for a slot that is out of range, to which two states would be written, or to which one is written while
    another sequence starts from it; for bounds that fall; and for more tokens accepted than there are slots. Arguments of the
    wrong type or shape are left to other checks."""
    if not isinstance(state, Tensor) or not isinstance(x, Tensor) or not state.dim():
        return
    if _is_readable(cu_seqlens, 1) and len(cu_seqlens) > 1 and x.dim():
        check_bounds(cu_seqlens, x.shape[0], whole=False)
    in_place = dst_indices is None
    if _is_readable(indices, 1, 2):
        used = _used(indices, cu_seqlens) if in_place else indices.flatten()
        check_rows("state_batch_indices", used, state, pad_slot, unique=in_place)
    target, pool = (state, "the state") if dst_state is None else (dst_state, "dst_state")
    if _is_readable(dst_indices, 1, 2):
        used = _used(dst_indices, cu_seqlens)
        check_rows("dst_state_batch_indices", used, target, pad_slot, pool=pool)
    _check_accepted(num_accepted, indices)
    if (not in_place or _is_readable(indices, 2)) and _is_same_pool(state, target):
        name, written = "dst_state_batch_indices", dst_indices
        if in_place:
            name, written = "state_batch_indices", indices
        _check_readers(name, indices, written, num_accepted, cu_seqlens, pad_slot)


def _check_accepted(num_accepted: Any, indices: Any) -> None:
    """Refuse more tokens accepted than there are slots, and numbers below 0."""
    if not (_is_readable(num_accepted, 1) and len(num_accepted) and _is_readable(indices, 2)):
        return
    most, least = int(num_accepted.max()), int(num_accepted.min())
    if least < 0 or most > indices.shape[1]:
        raise ValueError(
            f"num_accepted_tokens has the number {least if least < 0 else most}; accepted are 0 to {indices.shape[1]}, "
            "as many as state_batch_indices has columns"
        )


def _is_same_pool(state: Tensor, target: Any) -> bool:
    """Whether the slots of both are the same memory: one may be a view of the other."""
    if target is state:
        return True
    pools = (state, target)
    if not all(
        isinstance(p, Tensor) and has_values(p) and p.layout == torch.strided for p in pools
    ):
        return False
    return bool(state.data_ptr() == target.data_ptr() and state.stride() == target.stride())


def _check_readers(
    name: str, indices: Any, written: Any, num_accepted: Any, cu_seqlens: Any, pad_slot: int
) -> None:
    """Refuse to write to a slot that another sequence starts from: which comes first is not known. ``name`` is that of the
    indices that are ``written``."""
    if not _is_readable(written, 1, 2):
        return
    firsts = _first_slots(indices, num_accepted, len(written))
    if len(firsts) != len(written):
        return
    bounded = _is_readable(cu_seqlens, 1)
    if bounded and len(cu_seqlens) != len(firsts) + 1:
        return
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist() if bounded else [1] * len(firsts)
    readers: dict[int, set[int]] = {}
    for sequence, slot in enumerate(firsts):
        if lengths[sequence]:
            readers.setdefault(slot, set()).add(sequence)
    for sequence, length in enumerate(lengths):
        slots = written[sequence].reshape(-1)[:length].tolist()
        for slot in slots:
            others = readers.get(slot, set()) - {sequence}
            if slot >= 0 and slot != pad_slot and others:
                raise ValueError(
                    f"{name} has the number {slot} for sequence {sequence}, and sequence {min(others)} starts "
                    "from that slot; write to another slot, or to another pool, dst_state"
                )


def _first_slots(indices: Any, num_accepted: Any, batch: int) -> list[int]:
    """The slot that each sequence starts from; none of them where the numbers of accepted tokens cannot be read."""
    if indices is None:
        return list(range(batch))
    if not _is_readable(indices, 1, 2):
        return []
    if indices.dim() == 1:
        return list(indices.tolist())
    if not _is_readable(num_accepted, 1) or len(num_accepted) != len(indices):
        return []
    if not indices.shape[1]:
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
