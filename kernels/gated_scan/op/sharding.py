"""Which dimensions of a gated scan's tensors are sharded together: ``distributed.layouts`` explains the letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from scan_registry.distributed import layouts
from scan_registry.distributed.layouts import Layout, Sharding
from scan_registry.kernels.gated_scan.kinds import KINDS


def _gated(
    inputs: Any, parameters: Any, reset: Any, initial_state: Any, cu_seqlens: Any, dim: int
) -> tuple[list[str | None], str, str]:
    names = "bct" if dim % 3 == 2 else "btc"
    letters = [
        *[names for _ in inputs],
        *["c" for _ in parameters],
        *(
            layouts.optional(reset, "bt"),
            layouts.initial_of(initial_state, inputs[0].shape, names, cu_seqlens),
        ),
        layouts.optional(cu_seqlens, "."),
    ]
    return letters, names, layouts.state_of(names, cu_seqlens)


def forward(
    kind: str, inputs: Any, parameters: Any, reset: Any, initial_state: Any, cu_seqlens: Any,
    dim: int, reverse: bool, final: bool, backend: str,
) -> Layout:  # fmt: skip
    letters, names, state = _gated(inputs, parameters, reset, initial_state, cu_seqlens, dim)
    return Layout(tuple(letters), (names, state if final else None), "bc")


def backward(
    kind: str, inputs: Any, parameters: Any, reset: Any, initial_state: Any, cu_seqlens: Any,
    states: Tensor, states_grad: Any, last_grad: Any, dim: int, reverse: bool, backend: str,
    wanted: Sequence[bool],
) -> Layout:  # fmt: skip
    letters, names, state = _gated(inputs, parameters, reset, initial_state, cu_seqlens, dim)
    letters += [names, layouts.optional(states_grad, names), layouts.optional(last_grad, state)]
    results = [*[names for _ in inputs], *["c" for _ in parameters], state]
    there = [
        want and t is not None
        for t, want in zip([*inputs, *parameters, initial_state], wanted, strict=True)
    ]
    return Layout(tuple(letters), layouts.where_wanted(results, there), "bc")


def _times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    *inputs, _, _, reset = tensors
    dim = options[1] % 3
    places = [dim if isinstance(x, Tensor) and x.dim() == 3 else None for x in inputs]
    return [*places, None, None, None if reset is None else 1]


def _layout(tensors: Sequence[Any], options: Sequence[Any]) -> Layout:
    *inputs, initial_state, cu_seqlens, reset = tensors
    kind, *others = options
    count = len(KINDS[kind].inputs)
    parts = inputs[:count], inputs[count:]
    layout = forward(kind, *parts, reset, initial_state, cu_seqlens, *others)
    *letters, of_reset, of_initial, of_bounds = layout.inputs
    return layout._replace(inputs=(*letters, of_initial, of_bounds, of_reset))


SHARDING = Sharding(
    {"gated_scan": forward, "gated_scan_backward": backward},
    required=1,
    times=_times,
    layout=_layout,
)
