"""gated_scan in plain torch: what the kernels are tested and attested against.

Gates and tokens by the functions of ``kinds``, then h[t] = gate[t] * h[t-1] + token[t] and its reverse-mode derivative, one
step after the other in the dtype asked for. Sequential on purpose: no rounding but the recurrence's own.

Shapes: inputs and states are (batch, channels, time), or with ``dim=1`` (batch, time, channels); parameters are (channels,);
``reset`` is (batch, time), bool. A state is the inputs' shape without ``dim``; where sequences are packed along ``dim``, it is
that shape with ``dim`` counting sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.kinds import Kind

Gradients = tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gates, tokens and states are computed in, and the dtype of a final state."""
    return dtype if dtype == torch.float64 else torch.float32


def gates_and_tokens(
    kind: Kind,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor] = (),
    reset: Tensor | None = None,
    dim: int = -1,
) -> tuple[Tensor, Tensor]:
    """Of all steps, in the dtype of the computation. Where states start anew, the gate is anything."""
    compute, channel_last = compute_dtype(inputs[0].dtype), dim % 3 == 1
    of_channels = [
        p.to(compute) if channel_last else p.to(compute).unsqueeze(-1) for p in parameters
    ]
    restarts = None if reset is None else reset.unsqueeze(2 if channel_last else 1)
    gates, tokens = kind.gates(*(x.to(compute) for x in inputs), *of_channels, reset=restarts)
    return gates.expand(inputs[0].shape), tokens.expand(inputs[0].shape)


@torch.no_grad()
def forward(
    kind: Kind,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor] = (),
    *,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States in the dtype of the inputs, and the states after the last steps in the dtype of the computation.

    Where ``reset`` is true, the state before counts as zero, whatever it is. With ``reverse``, h[t] follows from h[t+1].
    """
    gates, tokens = gates_and_tokens(kind, inputs, parameters, reset, dim)
    walk = _Walk(tokens, reset, dim, reverse, cu_seqlens)
    states, ends = torch.empty_like(tokens), walk.states(initial_state)
    gate, token, out = (x.unbind(walk.dim) for x in (gates, tokens, states))
    for order, end in walk.sequences(ends):
        h = end
        for t in order:
            h = out[t].copy_(walk.unless_reset(t, gate[t] * h) + token[t])
        end.copy_(h)
    return states.to(inputs[0].dtype), walk.as_state(ends)


@torch.no_grad()
def backward(
    kind: Kind,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    states: Tensor,
    states_grad: Tensor,
    final_state_grad: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Gradients:
    """Gradients of the inputs and of the parameters, each in its dtype, and of the initial state in the dtype of the
    computation, given the forward's states."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, *parameters)]
    count = len(inputs)
    with torch.enable_grad():
        gates, tokens = gates_and_tokens(kind, leaves[:count], leaves[count:], reset, dim)
    walk = _Walk(tokens, reset, dim, reverse, cu_seqlens)
    adjoints, ends = torch.empty_like(tokens), walk.states(final_state_grad)
    gates_grad, initial = torch.empty_like(tokens), walk.states(initial_state)
    gate, state, grad, adjoint, gate_grad = (
        x.detach().unbind(walk.dim) for x in (gates, states, states_grad, adjoints, gates_grad)
    )
    for (order, end), before in zip(walk.sequences(ends), initial.unbind(walk.dim), strict=True):
        carried = end
        for place, t in reversed([*enumerate(order)]):
            adjoint[t].copy_(grad[t] + carried)
            earlier = state[order[place - 1]] if place else before
            gate_grad[t].copy_(walk.unless_reset(t, adjoint[t] * earlier))
            carried = walk.unless_reset(t, gate[t] * adjoint[t])
        end.copy_(carried)
    computed = [x for x in (gates, tokens) if x.requires_grad]
    theirs = [g for x, g in ((gates, gates_grad), (tokens, adjoints)) if x.requires_grad]
    gradients = torch.autograd.grad(computed, leaves, theirs, materialize_grads=True)
    return tuple(gradients[:count]), tuple(gradients[count:]), walk.as_state(ends)


class _Walk:
    """In which order steps come, and where states start anew."""

    def __init__(
        self, like: Tensor, reset: Tensor | None, dim: int, reverse: bool, cu_seqlens: Tensor | None
    ) -> None:
        self.dim = dim % like.dim()
        self._like, self._reverse, self._packed = like, reverse, cu_seqlens is not None
        self._resets = None if reset is None else reset.unsqueeze(-1).unbind(1)
        ends = [0, like.shape[self.dim]] if cu_seqlens is None else cu_seqlens.tolist()
        self._bounds = list(pairwise(ends))

    def states(self, state: Tensor | None) -> Tensor:
        """A copy of the states before, or after, each sequence; zeros if none are given. ``dim`` counts sequences."""
        shape = [*self._like.shape]
        shape[self.dim] = len(self._bounds)
        copy = torch.zeros(shape, dtype=self._like.dtype, device=self._like.device)
        if state is None:
            return copy
        if self._packed:
            return copy.copy_(state)
        return copy.copy_(state.expand(self.as_state(copy).shape).unsqueeze(self.dim))

    def as_state(self, states: Tensor) -> Tensor:
        """As users have them."""
        return states if self._packed else states.squeeze(self.dim)

    def sequences(self, states: Tensor) -> Iterator[tuple[range, Tensor]]:
        """The steps of each, in their order, and its state."""
        for (begin, end), state in zip(self._bounds, states.unbind(self.dim), strict=True):
            yield range(begin, end)[:: -1 if self._reverse else 1], state

    def unless_reset(self, t: int, x: Tensor) -> Tensor:
        """``x``, or zero where states start anew at a step."""
        return x if self._resets is None else torch.where(self._resets[t], 0, x)
