"""Which dimensions of an SSD scan's tensors are sharded together: ``distributed.layouts`` explains the letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scan_registry.distributed.layouts import Layout, Sharding, optional, where_wanted


def _dual(*tensors: Any) -> tuple[list[str | None], str, Mapping[str, int]]:
    """The letters of all tensors, (batch, time, heads, size of a head) and so on, those of a state, and ``Layout.whole``."""
    cu_seqlens, groups = tensors[9], tensors[3].shape[2]
    state = "bc.." if cu_seqlens is None else "b.c.."
    projection = "bt.." if groups == 1 else "btC."
    letters = ["btc.", "btc", "c", projection, projection, "c", "c", state, "bt", "."]
    names = [optional(t, of) for t, of in zip(tensors, letters, strict=True)]
    return names, state, {} if groups == 1 else {"c": groups}


def forward(*args: Any) -> Layout:
    tensors, final = args[:10], args[-2]
    letters, state, whole = _dual(*tensors)
    return Layout(tuple(letters), ("btc.", state if final else None), "bc", whole)


def backward(*args: Any) -> Layout:
    tensors, final_grad, wanted = args[:10], args[11], args[-1]
    letters, state, whole = _dual(*tensors)
    there = [want and t is not None for t, want in zip(tensors[:8], wanted, strict=True)]
    results = where_wanted([letter or "" for letter in letters[:8]], there)
    return Layout((*letters, "btc.", optional(final_grad, state)), results, "bc", whole)


def _times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    times = [1, 1, None, 1, 1, None, 1, None, None, 1, None]
    return [None if t is None else time for t, time in zip(tensors, times, strict=True)]


def _layout(tensors: Sequence[Any], options: Sequence[Any]) -> Layout | None:
    """Of all tensors with ``z``, and a ``D`` that may be (heads, P)."""
    (B, _, D, z), seq_idx, final = tensors[3:7], tensors[9], options[3]
    if seq_idx is not None or B.dim() != 4:
        return None
    letters, state, whole = _dual(*tensors[:6], *tensors[7:])
    letters[5] = None if D is None else "c."[: D.dim()]
    letters.insert(6, optional(z, "btc."))
    return Layout(tuple(letters), ("btc.", state if final else None), "bc", whole)


SHARDING = Sharding(
    {"ssd_scan": forward, "ssd_scan_backward": backward}, required=5, times=_times, layout=_layout
)
