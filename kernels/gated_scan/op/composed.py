"""``gated_scan`` composed of torch's operators, which compute gates and tokens, and of ``linear_scan``.

This runs where the family's own kernels cannot: on the CPU, on GPUs that none of them fits, for float64, with
``backend="triton"``, and for derivatives of derivatives, forward mode and ``torch.func``.
If no derivatives are recorded, the tensors are computed piece by piece: a piece is some channels of some batches. Gates and
tokens of a piece stay in the caches of a CPU, and take little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op.arguments import Arguments, Options
from scan_registry.kernels.linear_scan.op import arguments
from scan_registry.kernels.linear_scan.op import autograd as derivatives
from scan_registry.kernels.linear_scan.op import stretches as resets
from scan_registry.kernels.linear_scan.op.problems import StateLayout
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops.call import unobserved
from scan_registry.ops.recomputation import Pairs, gradients

#: The most elements of a piece, by whether it is on a GPU; and the fewest channels of a piece.
_PIECE = {True: 1 << 26, False: 1 << 20}
_CHANNELS = 16

_is_compiling = torch.compiler.is_compiling


def forward(given: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    """States and, if asked for, the final state, of ``normalised`` arguments."""
    if torch.is_grad_enabled() or _is_compiling() or not unobserved(*given.flat):
        return _forward(given, options)
    pieces = [*_pieces(given, options)]
    if len(pieces) < 2:
        return _forward(given, options)
    model = given.inputs[0]
    states, last = torch.empty_like(model), None
    if options.final:
        last = StateLayout.of(model, options.dim, given.cu_seqlens).empty()
    for piece in pieces:
        made, ends = _forward(piece.of(given), options)
        piece.sequence(states).copy_(made)
        if last is not None and ends is not None:
            piece.state(last).copy_(ends)
    return states, last


def _forward(given: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    gates, tokens = gates_and_tokens(given, options)
    backend = "auto" if options.backend == "cuda" else options.backend
    how = arguments.Options(options.dim, options.reverse, options.final, backend)
    states_before = given.initial_state, given.cu_seqlens
    if given.reset is None:
        states, last = derivatives.scan(gates, tokens, *states_before, how)
    else:
        states, last = resets.scan(gates, tokens, given.reset, *states_before, how)
    return states.to(given.inputs[0].dtype), last


def gates_and_tokens(given: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """Gates and tokens for a linear scan, in the dtype of the computation. At a reset the gate may be anything."""
    compute = compute_dtype(given.inputs[0].dtype)
    inputs = [x.to(compute) for x in given.inputs]
    of_channels = [p if options.dim == -2 else p.unsqueeze(-1) for p in given.parameters]
    reset = given.reset
    if reset is not None:
        reset = reset.unsqueeze(-1 if options.dim == -2 else -2)
    gates, tokens = KINDS[options.kind].gates(*inputs, *of_channels, reset=reset)
    return gates, tokens.expand(given.inputs[0].shape)


class _Piece(NamedTuple):
    """Some channels of some batches."""

    batches: slice
    channels: slice
    options: Options

    def sequence(self, x: Tensor) -> Tensor:
        """This piece of a tensor with the shape of an input."""
        if self.options.dim == -2:
            return x[self.batches, :, self.channels]
        return x[self.batches, self.channels]

    def state(self, x: Tensor) -> Tensor:
        """This piece of a tensor with the shape of a state. With packed sequences a state has three dimensions, like an input."""
        return self.sequence(x) if x.dim() == 3 else x[self.batches, self.channels]

    def of(self, given: Arguments) -> Arguments:
        """This piece of all arguments."""
        initial, reset = given.initial_state, given.reset
        return Arguments(
            tuple([self.sequence(x) for x in given.inputs]),
            tuple([p[self.channels] for p in given.parameters]),
            None if reset is None else reset[self.batches],
            None if initial is None else self.state(initial),
            given.cu_seqlens,
        )


def _pieces(given: Arguments, options: Options) -> Iterator[_Piece]:
    """Pieces of one batch each, or of several batches if these have few elements."""
    model = given.inputs[0]
    batch, (channels, time) = model.shape[0], model.shape[1:]
    if options.dim == -2:
        channels, time = time, channels
    room = _PIECE[model.is_cuda]
    width = min(channels, max(_CHANNELS, room // max(1, time)))
    height = max(1, room // max(1, channels * time))
    for row in range(0, batch, height):
        for begin in range(0, channels, max(1, width)):
            yield _Piece(slice(row, row + height), slice(begin, begin + width), options)


def backward(
    given: Arguments,
    options: Options,
    states_grad: Tensor | None,
    last_grad: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, of ``given.differentiable``. They are differentiable themselves where derivatives are
    recorded. Gates and tokens are computed again, so the forward pass keeps none."""
    grads = states_grad, last_grad
    if torch.is_grad_enabled() or _is_compiling() or not unobserved(*given.flat, *grads):
        return _backward(given, options, *grads, wanted)
    pieces = [*_pieces(given, options)]
    if len(pieces) < 2:
        return _backward(given, options, *grads, wanted)
    found = [
        torch.empty_like(t) if want and t is not None else None
        for t, want in zip(given.differentiable, wanted, strict=True)
    ]
    count = len(given.inputs)
    for total in found[count:-1]:
        if total is not None:
            total.zero_()
    for piece in pieces:
        made = _backward(
            piece.of(given),
            options,
            None if states_grad is None else piece.sequence(states_grad),
            None if last_grad is None else piece.state(last_grad),
            wanted,
        )
        for place, (whole, grad) in enumerate(zip(found, made, strict=True)):
            if whole is None or grad is None:
                continue
            if place < count:
                piece.sequence(whole).copy_(grad)
            elif place < len(found) - 1:
                whole[piece.channels] += grad
            else:
                piece.state(whole).copy_(grad)
    return tuple(found)


def _backward(
    given: Arguments,
    options: Options,
    states_grad: Tensor | None,
    last_grad: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    count = len(given.inputs)

    def recompute(leaves: list[Any], _: bool) -> Pairs:
        inputs = given._replace(
            inputs=tuple(leaves[:count]),
            parameters=tuple(leaves[count:-1]),
            initial_state=leaves[-1],
        )
        made = _forward(inputs, options._replace(final=last_grad is not None))
        return zip(made, (states_grad, last_grad), strict=True)

    return gradients(given.differentiable, wanted, recompute)
