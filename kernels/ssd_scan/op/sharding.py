"""Which dimensions of an SSD scan's tensors are sharded together: ``distributed.layouts`` explains the letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scan_registry.distributed.layouts import Layout, Sharding, optional, where_wanted


def _dual(*tensors: Any) -> tuple[list[str | None], str, Mapping[str, int]]:
    """The letters of all tensors, (batch, time, heads, size of a head) and so on, those of a state, and ``Layout.whole``."""
    cu_seqlens, groups, D = tensors[10], tensors[3].shape[2], tensors[5]
    state = "bc.." if cu_seqlens is None else "b.c.."
    projection = "bt.." if groups == 1 else "btC."
    of_D = "c" if D is None else "c."[: D.dim()]
    letters = ["btc.", "btc", "c", projection, projection, of_D, "btc.", "c", state, "bt", "."]
    names = [optional(t, of) for t, of in zip(tensors, letters, strict=True)]
    return names, state, {} if groups == 1 else {"c": groups}


def forward(*args: Any) -> Layout:
    tensors, final = args[:11], args[-3]
    letters, state, whole = _dual(*tensors)
    ungated = optional(tensors[6], "btc.")
    return Layout(tuple(letters), ("btc.", state if final else None, ungated), "bc", whole)


def backward(*args: Any) -> Layout:
    tensors, ungated, final_grad, wanted = args[:11], args[11], args[13], args[-1]
    letters, state, whole = _dual(*tensors)
    there = [want and t is not None for t, want in zip(tensors[:9], wanted, strict=True)]
    results = where_wanted([letter or "" for letter in letters[:9]], there)
    kept = None if ungated is None else "btc." if ungated.dim() == 4 else "."
    return Layout((*letters, kept, "btc.", optional(final_grad, state)), results, "bc", whole)


def _times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    times = [1, 1, None, 1, 1, None, 1, None, None, 1, None]
    return [None if t is None else time for t, time in zip(tensors, times, strict=True)]


def _layout(tensors: Sequence[Any], options: Sequence[Any]) -> Layout | None:
    seq_idx, final = tensors[9], options[3]
    if seq_idx is not None or tensors[3].dim() != 4:
        return None
    letters, state, whole = _dual(*tensors)
    return Layout(tuple(letters), ("btc.", state if final else None), "bc", whole)


SHARDING = Sharding(
    {"ssd_scan": forward, "ssd_scan_backward": backward}, required=5, times=_times, layout=_layout
)
