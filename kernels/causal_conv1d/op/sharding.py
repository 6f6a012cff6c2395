"""Which dimensions of a causal convolution's tensors are sharded together: ``distributed.layouts`` explains the letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from scan_registry.distributed.layouts import Layout, Sharding, optional, where_wanted


def _convolution(
    x: Tensor, weight: Tensor, bias: Any, initial_state: Any, seq_idx: Any, cu_seqlens: Any
) -> tuple[list[str | None], str, str]:
    state = "bc." if cu_seqlens is None else ".c."
    letters = [
        *("bct", "c.", optional(bias, "c"), optional(initial_state, state)),
        *(optional(seq_idx, "bt"), optional(cu_seqlens, ".")),
    ]
    return letters, state, "bc" if cu_seqlens is None else "c"


def forward(*args: Any) -> Layout:
    *tensors, _, final, _ = args
    inputs, state, letters = _convolution(*tensors)
    return Layout(tuple(inputs), ("bct", state if final else None), letters)


def backward(*args: Any) -> Layout:
    tensors, (_, last_grad, _, _, wanted) = args[:6], args[6:]
    inputs, state, letters = _convolution(*tensors)
    inputs += ["bct", optional(last_grad, state)]
    return Layout(tuple(inputs), where_wanted(("bct", "c.", "c", state), wanted), letters)


def _times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    return [2, None, None, None, None if tensors[4] is None else 1, None]


def _layout(tensors: Sequence[Any], options: Sequence[Any]) -> Layout:
    final, activation, backend = options
    return forward(*tensors, activation, final, backend)


SHARDING = Sharding(
    {"causal_conv1d": forward, "causal_conv1d_backward": backward},
    required=2,
    times=_times,
    layout=_layout,
)
