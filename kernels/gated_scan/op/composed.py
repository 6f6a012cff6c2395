"""``gated_scan`` composed of torch's operators, which compute gates and tokens, and of ``linear_scan``.

This runs where neither the family's own kernels nor its compiled code for the CPU can: on GPUs that no kernel fits, on the CPU for
kinds without a header in C, for float64, with ``backend="triton"``, and for derivatives of derivatives, forward mode and
``torch.func``.
If no derivatives are recorded, the tensors are computed piece by piece: a piece is some channels of some batches. Gates and
tokens of a piece stay in the caches of a CPU, and take little memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op.arguments import Arguments, Options
from scan_registry.kernels.linear_scan.op import autograd as derivatives
from scan_registry.kernels.linear_scan.op import stretches as resets
from scan_registry.kernels.linear_scan.op.arguments import Options as LinearOptions
from scan_registry.kernels.linear_scan.op.problems import StateLayout
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops.call import unobserved
from scan_registry.ops.recomputation import Pairs, gradients

#: The most elements of a piece, by whether it is on a GPU; and the fewest channels of a piece.
_PIECE = {True: 1 << 26, False: 1 << 20}
_CHANNELS = 16

_is_compiling = torch.compiler.is_compiling


def empty(
    model: Tensor, cu_seqlens: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Memory for the states of inputs like ``model`` and, if asked for, the final state."""
    layout = StateLayout.of(model, options.dim, cu_seqlens)
    return torch.empty_like(model), layout.empty() if options.final else None


def forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    """States and, if asked for, the final state, of ``normalised`` arguments."""
    if torch.is_grad_enabled() or _is_compiling() or not unobserved(*arguments.flat):
        return _forward(arguments, options)
    pieces = [*_pieces(arguments, options)]
    if len(pieces) < 2:
        return _forward(arguments, options)
    states, last = empty(arguments.inputs[0], arguments.cu_seqlens, options)
    for piece in pieces:
        states_of_piece, ends = _forward(piece.of(arguments), options)
        piece.sequence(states).copy_(states_of_piece)
        if last is not None and ends is not None:
            piece.state(last).copy_(ends)
    return states, last


def _forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    gates, tokens = gates_and_tokens(arguments, options)
    backend = "auto" if options.backend == "cuda" else options.backend
    how = LinearOptions(options.dim, options.reverse, options.final, backend)
    states_before = arguments.initial_state, arguments.cu_seqlens
    if arguments.reset is None:
        states, final_state = derivatives.scan(gates, tokens, *states_before, how)
    else:
        states, final_state = resets.scan(gates, tokens, arguments.reset, *states_before, how)
    return states.to(arguments.inputs[0].dtype), final_state


def gates_and_tokens(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """Gates and tokens for a linear scan, in the dtype of the computation. At a reset the gate may be anything."""
    compute = compute_dtype(arguments.inputs[0].dtype)
    inputs = [x.to(compute) for x in arguments.inputs]
    of_channels = [p if options.dim == -2 else p.unsqueeze(-1) for p in arguments.parameters]
    reset = arguments.reset
    if reset is not None:
        reset = reset.unsqueeze(-1 if options.dim == -2 else -2)
    gates, tokens = KINDS[options.kind].gates(*inputs, *of_channels, reset=reset)
    return gates, tokens.expand(arguments.inputs[0].shape)


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

    def of(self, arguments: Arguments) -> Arguments:
        """This piece of all arguments."""
        initial, reset = arguments.initial_state, arguments.reset
        return Arguments(
            tuple([self.sequence(x) for x in arguments.inputs]),
            tuple([p[self.channels] for p in arguments.parameters]),
            None if reset is None else reset[self.batches],
            None if initial is None else self.state(initial),
            arguments.cu_seqlens,
        )

    def put(
        self, grads: Sequence[Tensor | None], totals: Sequence[Tensor | None], inputs: int
    ) -> None:
        """Write the gradients of this piece's ``Arguments.differentiable`` into those of the whole, which begin with as many
        inputs. Parameters sum over pieces."""
        for place, (whole, grad) in enumerate(zip(totals, grads, strict=True)):
            if whole is None or grad is None:
                continue
            if place < inputs:
                self.sequence(whole).copy_(grad)
            elif place < len(totals) - 1:
                whole[self.channels] += grad
            else:
                self.state(whole).copy_(grad)


def _pieces(arguments: Arguments, options: Options) -> Iterator[_Piece]:
    """Pieces of one batch each, or of several batches if these have few elements."""
    model = arguments.inputs[0]
    batch, (channels, time) = model.shape[0], model.shape[1:]
    if options.dim == -2:
        channels, time = time, channels
    elements = _PIECE[model.is_cuda]
    width = min(channels, max(_CHANNELS, elements // max(1, time)))
    height = max(1, elements // max(1, channels * time))
    for row in range(0, batch, height):
        for begin in range(0, channels, max(1, width)):
            yield _Piece(slice(row, row + height), slice(begin, begin + width), options)


def backward(
    arguments: Arguments, options: Options, states_grad: Tensor | None, last_grad: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients that are wanted, of ``arguments.differentiable``. They are differentiable themselves where derivatives are
    recorded. Gates and tokens are computed again, so the forward pass keeps none."""
    grads = states_grad, last_grad
    if torch.is_grad_enabled() or _is_compiling() or not unobserved(*arguments.flat, *grads):
        return _backward(arguments, options, *grads, wanted)
    pieces = [*_pieces(arguments, options)]
    if len(pieces) < 2:
        return _backward(arguments, options, *grads, wanted)
    totals = [
        torch.empty_like(t) if want and t is not None else None
        for t, want in zip(arguments.differentiable, wanted, strict=True)
    ]
    for total in totals[len(arguments.inputs) : -1]:
        if total is not None:
            total.zero_()
    for piece in pieces:
        of_piece = _backward(
            piece.of(arguments),
            options,
            None if states_grad is None else piece.sequence(states_grad),
            None if last_grad is None else piece.state(last_grad),
            wanted,
        )
        piece.put(of_piece, totals, len(arguments.inputs))
    return tuple(totals)


def _backward(
    arguments: Arguments, options: Options, states_grad: Tensor | None, last_grad: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    count = len(arguments.inputs)

    def recompute(leaves: list[Any], _: bool) -> Pairs:
        inputs = arguments._replace(
            inputs=tuple(leaves[:count]),
            parameters=tuple(leaves[count:-1]),
            initial_state=leaves[-1],
        )
        outputs = _forward(inputs, options._replace(final=last_grad is not None))
        return zip(outputs, (states_grad, last_grad), strict=True)

    return gradients(arguments.differentiable, wanted, recompute)
