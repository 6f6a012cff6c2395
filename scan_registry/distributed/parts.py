"""Where a rank's part of time lies among packed sequences, whose bounds all ranks pass.

The module checks the bounds, and computes which sequences continue from an earlier part or into a later one, and which ranks hold them. That is pure
arithmetic on bounds and lengths. A scan in reverse is a forward scan in mirrored time, so the code treats forward scans and
mirrors the result.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from scan_registry.distributed.headers import Terms

#: A range of steps: the first, and the one after the last, counted from the beginning of the part.
Steps = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """One rank's part of time. A position is a rank's place in scan order.

    position  this rank's position
    enters    the sequence that continues from the part before, whose state enters this part; None if there is none
    leaves    the sequence that continues in the next part, whose state leaves this part; None if there is none
    tail      the steps of ``leaves`` in this part; None for all steps
    head      the steps of ``enters`` in this part; None for all steps
    earlier   positions before this one that hold steps of ``enters``
    later     positions after this one that hold steps of ``leaves``
    begins    sequences whose first step is in this part; the first position also has all empty sequences
    ends      sequences whose last step is in this part; the first position also has all empty sequences
    bounds    bounds of the sequences in this part, counted from its beginning; None where nothing is packed
    """

    position: int
    enters: int | None
    leaves: int | None
    tail: Steps | None
    head: Steps | None
    earlier: range
    later: range
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    bounds: tuple[int, ...] | None = None


def whole(position: int, ranks: int) -> Part:
    """The part at this position of one sequence that is cut between all ranks, for parts of any lengths."""
    first, last = position == 0, position == ranks - 1
    return Part(
        position,
        None if first else 0,
        None if last else 0,
        tail=None,
        head=None,
        earlier=range(position),
        later=range(position + 1, ranks),
        begins=(0,) if first else (),
        ends=(0,) if last else (),
    )


def packed(bounds: Sequence[int], lengths: Sequence[int], rank: int, reverse: bool) -> Part:
    """The part of a rank, with sequences that are packed along the time of all ranks.

    ``bounds`` rise from 0 to the sum of the ranks' ``lengths``.
    """
    if not reverse:
        return _packed(bounds, lengths, rank)
    total, count, time = bounds[-1], len(bounds) - 2, lengths[rank]
    mirrored = _packed(
        [total - bound for bound in reversed(bounds)],
        [*reversed(lengths)],
        len(lengths) - 1 - rank,
    )

    def number(sequence: int | None) -> int | None:
        return None if sequence is None else count - sequence

    def steps(ends: Steps | None) -> Steps | None:
        return None if ends is None else (time - ends[1], time - ends[0])

    assert mirrored.bounds is not None
    return replace(
        mirrored,
        enters=number(mirrored.enters),
        leaves=number(mirrored.leaves),
        tail=steps(mirrored.tail),
        head=steps(mirrored.head),
        begins=tuple(count - number for number in mirrored.begins),
        ends=tuple(count - number for number in mirrored.ends),
        bounds=tuple(time - bound for bound in reversed(mirrored.bounds)),
    )


def _packed(bounds: Sequence[int], lengths: Sequence[int], position: int) -> Part:
    starts = [0, *accumulate(lengths)]
    start, end = starts[position], starts[position + 1]
    enters, leaves = _across(bounds, start), _across(bounds, end)
    tail, head = (0, 0), (0, 0)
    earlier = later = range(0)
    if enters is not None:
        head = 0, min(bounds[enters + 1], end) - start
        # The first position that ends after the sequence has begun.
        earlier = range(bisect_right(starts, bounds[enters], 1) - 1, position)
    if leaves is not None:
        tail = max(bounds[leaves], start) - start, end - start
        # Up to the last position that starts before the sequence ends.
        later = range(position + 1, bisect_left(starts, bounds[leaves + 1], 0, len(lengths)))
    pairs = list(pairwise(bounds))
    empty = [j for j, (a, b) in enumerate(pairs) if a == b] if position == 0 else []
    begins = [j for j, (a, b) in enumerate(pairs) if a < b and start <= a < end]
    ends = [j for j, (a, b) in enumerate(pairs) if a < b and start < b <= end]
    return Part(
        position,
        enters,
        leaves,
        tail,
        head,
        earlier,
        later,
        tuple(sorted(begins + empty)),
        tuple(sorted(ends + empty)),
        tuple(min(max(bound - start, 0), end - start) for bound in bounds),
    )


def _across(bounds: Sequence[int], time: int) -> int | None:
    """The sequence that has steps on both sides of this time."""
    if time >= bounds[-1]:
        return None
    number = bisect_right(bounds, time) - 1
    return None if bounds[number] == time else number


# --- Bounds -----------------------------------------------------------------------------------


def host_bounds(cu_seqlens: Any) -> tuple[int, ...] | None:
    """The values of ``cu_seqlens``, if there are any. They are checked, except that the last one is the number of steps of all
    ranks."""
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor, not {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}; accepted are int32 and int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (sequences + 1,), with one sequence at least"
        )
    bounds = tuple(cu_seqlens.tolist())
    wrong = None if bounds[0] == 0 else f"begins with {bounds[0]}"
    for number, (one, following) in enumerate(pairwise(bounds), 1):
        if one > following:
            wrong = f"falls from {one} to {following} at index {number}"
            break
    if wrong:
        raise ValueError(f"cu_seqlens {wrong}; it must rise from 0 to the steps of all ranks")
    return bounds


def local_bounds(bounds: tuple[int, ...] | None, x: Any, dim: int) -> Tensor | None:
    """Bounds of as many sequences in the steps that ``x`` has along ``dim``, for the check of the initial state's shape."""
    if bounds is None or not isinstance(x, Tensor):
        return None
    time = x.shape[dim] if x.dim() > dim else 0
    return torch.tensor([0] * (len(bounds) - 1) + [time], dtype=torch.int32, device=x.device)


def check_steps(bounds: tuple[int, ...] | None, lengths: list[int]) -> None:
    """Refuse bounds that do not end at the sum of the ranks' lengths."""
    if bounds is not None and bounds[-1] != sum(lengths):
        raise ValueError(
            f"cu_seqlens ends with {bounds[-1]}; the ranks have {lengths} steps, {sum(lengths)} together"
        )


def compared(bounds: tuple[int, ...] | None) -> tuple[int, str]:
    """The fields ``digest`` and ``spelled`` of the terms of a call with these bounds."""
    if bounds is None:
        return 0, ""
    digest = int.from_bytes(blake2b(repr(bounds).encode(), digest_size=7).digest(), "little")
    if len(bounds) <= 12:
        return digest, f"cu_seqlens {list(bounds)}"
    return (
        digest,
        f"cu_seqlens {list(bounds[:12])} and {len(bounds) - 12} more, hash of all {digest:x}",
    )


def terms_of(
    operator: str, own: tuple[tuple[str, Any], ...], steps: int, tensors: tuple[Tensor | None, ...],
    bounds: tuple[int, ...] | None, final: bool,
) -> Terms:  # fmt: skip
    """What ranks compare: what the operator says of its ``own`` arguments, and what calls of all operators have."""
    recording = torch.is_grad_enabled()
    common = (
        *own,
        ("initial_state", None if tensors[-1] is None else "given"),
        ("cu_seqlens", None if bounds is None else "given"),
        ("return_final_state", final),
        ("gradients", "recorded" if recording else "not recorded"),
    )
    wants = recording and any(t is not None and t.requires_grad for t in tensors)
    digest, spelled = compared(bounds)
    return Terms(operator, common, (steps, int(wants)), 0, digest, spelled)
