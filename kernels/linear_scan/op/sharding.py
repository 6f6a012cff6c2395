"""Which dimensions of a linear scan's tensors are sharded together: ``distributed.layouts`` explains the letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.distributed import layouts
from scan_registry.distributed.layouts import Layout, Sharding
from scan_registry.kernels.linear_scan.op.stretches import batch_dim
from scan_registry.ops.checks import common_shape


def forward(
    gates: Tensor, tokens: Tensor, initial_state: Any, cu_seqlens: Any, dim: int, reverse: bool,
    final: bool, backend: str,
) -> Layout:  # fmt: skip
    shape = torch.broadcast_shapes(gates.shape, tokens.shape)
    names = layouts.names_of(len(shape), dim)
    inputs = (
        layouts.broadcast(gates.shape, shape, names),
        layouts.broadcast(tokens.shape, shape, names),
        layouts.initial_of(initial_state, shape, names, cu_seqlens),
        layouts.optional(cu_seqlens, "."),
    )
    return Layout(
        inputs, (names, layouts.state_of(names, cu_seqlens) if final else None), layouts.only(names)
    )


def backward(
    gates: Tensor, states: Any, states_grad: Tensor, initial_state: Any, last_grad: Any,
    cu_seqlens: Any, dim: int, reverse: bool, backend: str, wanted: Sequence[bool],
) -> Layout:  # fmt: skip
    names = layouts.names_of(states_grad.dim(), dim)
    state = layouts.state_of(names, cu_seqlens)
    of_gates = layouts.broadcast(gates.shape, states_grad.shape, names)
    inputs = (
        *(of_gates, layouts.optional(states, names), names, layouts.optional(initial_state, state)),
        *(layouts.optional(last_grad, state), layouts.optional(cu_seqlens, ".")),
    )
    return Layout(
        inputs, layouts.where_wanted((of_gates, names, state), wanted), layouts.only(names)
    )


def summary(gates: Tensor, tokens: Tensor, dim: int, reverse: bool, backend: str) -> Layout:
    names = layouts.names_of(tokens.dim(), dim)
    state = layouts.state_of(names, None)
    return Layout(
        (layouts.broadcast(gates.shape, tokens.shape, names), names),
        (state, state),
        layouts.only(names),
    )


def _times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    gates, tokens, *_, reset = tensors
    rank, dim = max(gates.dim(), tokens.dim()), options[0]
    back = dim if dim < 0 else dim - rank
    places = [tensor.dim() + back for tensor in (gates, tokens)]
    of_reset = None if reset is None else reset.dim() - 1
    return [*(place if place >= 0 else None for place in places), None, None, of_reset]


def _layout(tensors: Sequence[Any], options: Sequence[Any]) -> Layout | None:
    *others, reset = tensors
    if common_shape(others[0].shape, others[1].shape) is None:
        return None
    layout = forward(*others, *options)
    names = layout.outputs[0]
    assert names is not None
    batch = "" if len(names) == 1 else names[batch_dim(len(names), options[0])]
    return layout._replace(inputs=(*layout.inputs, None if reset is None else batch + layouts.TIME))


SHARDING = Sharding(
    {"linear_scan": forward, "linear_scan_backward": backward, "linear_scan_summary": summary},
    required=2,
    times=_times,
    layout=_layout,
)
