"""How a gated scan runs, forwards and backwards. Arguments are as ``normalised`` makes them.

Nothing here is recorded by autograd: ``gated_scan_derivatives`` calls both with derivatives switched off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scan_registry.ops import gated_scan_composed as composed
from scan_registry.ops.gated_scan_arguments import Arguments, Options
from scan_registry.ops.problems import StateLayout


def forward(given: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    """States that lie as a new tensor like the first input does, and if asked for the final state, which lies as
    ``StateLayout`` has it."""
    with torch.no_grad():
        states, last = composed.forward(given, options)
    return as_allotted(given, options, states, last)


def backward(
    given: Arguments,
    states: Tensor,
    states_grad: Tensor | None,
    last_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, of what is differentiable, from the states that ``forward`` made. One of both
    gradients is there."""
    with torch.no_grad():
        return composed.backward(given, options, states_grad, last_grad, wanted)


def as_allotted(
    given: Arguments, options: Options, states: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Results in the memory layout that the operator promises."""
    model = given.inputs[0]
    room = torch.empty_like(model)
    if states.stride() != room.stride():
        states = room.copy_(states)
    if last is not None:
        of_state = StateLayout.of(model, options.dim, given.cu_seqlens)
        # A view of the states would keep all of them, and outputs of an operator share no memory.
        last = of_state.empty().copy_(last)
    return states, last
