"""Which dimensions of a selective scan's tensors are sharded together: ``distributed.layouts`` explains the letters."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from torch import Tensor

from scan_registry.distributed.layouts import TIME, Layout, Sharding, optional, where_wanted


def _projection(tensor: Tensor, pairs: bool, whole: dict[str, int]) -> str:
    """The letters of B or C of a selective scan. Groups are sharded together with channels, so that a group's channels
    stay on one rank; ``whole`` receives the number of groups. ``pairs``: time holds pairs of numbers, which a shard of odd
    length would split."""
    time = "." if pairs else TIME
    if tensor.dim() == 2:
        return "c."
    if tensor.dim() == 3:
        return f"b.{time}"
    groups = tensor.shape[1]
    if groups == 1:
        return f"b..{time}"
    whole["c"] = gcd(groups, whole.get("c", groups))
    return f"bC.{time}"


def _selective(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any, z: Any, delta_bias: Any,
    initial_state: Any, cu_seqlens: Any,
) -> tuple[list[str], str, dict[str, int]]:  # fmt: skip
    """The letters of all arguments that have a gradient, those of a state, and ``Layout.whole``."""
    state = "bc." if cu_seqlens is None else "b.c."
    whole: dict[str, int] = {}
    of_B, of_C = (_projection(x, A.is_complex(), whole) for x in (B, C))
    return ["bct", "bct", "c.", of_B, of_C, "c", "bct", "c", state], state, whole


def forward(*args: Any) -> Layout:
    *tensors, _, _, _ = args
    letters, state, whole = _selective(*tensors)
    inputs = [optional(t, names) for t, names in zip(tensors, [*letters, "."], strict=True)]
    return Layout(tuple(inputs), ("bct", state, _CHECKPOINTS), "bc", whole)


#: The letters of the states that forward keeps for backward: (batch, intervals, channels, states), or an empty tensor.
_CHECKPOINTS = "b.c."


def backward(*args: Any) -> Layout:
    tensors, others = args[:10], args[10:]
    checkpoints, _, last_grad, _, _, wanted = others
    letters, state, whole = _selective(*tensors)
    kept = _CHECKPOINTS if checkpoints.dim() == 4 else "."
    inputs = [optional(t, names) for t, names in zip(tensors, [*letters, "."], strict=True)]
    inputs += [kept, "bct", optional(last_grad, state)]
    there = [want and t is not None for t, want in zip(tensors[:9], wanted, strict=True)]
    return Layout(tuple(inputs), where_wanted(letters, there), "bc", whole)


def _times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    B, C, z = tensors[3], tensors[4], tensors[6]
    of_B, of_C = (x.dim() - 1 if x.dim() > 2 else None for x in (B, C))
    return [2, 2, None, of_B, of_C, None, None if z is None else 2, None, None, None]


def _layout(tensors: Sequence[Any], options: Sequence[Any]) -> Layout | None:
    A, B, C = tensors[2:5]
    if A.is_complex() and max(B.dim(), C.dim()) > 2:
        return None  # time holds pairs of numbers
    return forward(*tensors, *options)


SHARDING = Sharding(
    {"selective_scan": forward, "selective_scan_backward": backward},
    required=5,
    times=_times,
    layout=_layout,
)
