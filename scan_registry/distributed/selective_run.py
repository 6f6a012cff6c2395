"""The forward and backward pass of a selective scan over ranks, in pieces of channels.

A piece starts when the state before it has come from the rank before. As soon as the piece is done, its last state goes to the
next rank. The backward pass sends gradients of states from the last rank to the first. ``selective_reduce`` has the other
schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.distributed import group as groups
from scan_registry.distributed import selective_reduce as reduce
from scan_registry.distributed.group import Members
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.opening import Opening, opening_of
from scan_registry.distributed.parts import Part
from scan_registry.distributed.selective_reduce import Gathered
from scan_registry.kernels.selective_scan import reference
from scan_registry.ops import selective_scan_plans as plans
from scan_registry.ops.selective_scan_arguments import Arguments, Options
from scan_registry.ops.selective_scan_derivatives import first_derivative

#: A call has ``PIECES`` · (ranks − 1) pieces, at most ``MOST``. Without fixed costs, the pipeline then takes 1 + 1 / ``PIECES``
#: times as long as one rank's part alone.
PIECES, MOST = 4, 64
#: The fewest rows (batch · channels) of a piece on a GPU. A kernel works on a row's steps one after another, and an SM of an
#: H100 or H200 on 64 rows at a time, so a piece of fewer rows than the 132 SMs hold takes as long as one that fills them.
#: The number is the same on all GPUs, as all ranks have to cut alike.
WAVE = 64 * 132

_DIFFERENTIABLE = 9

#: Of each piece, the states before it and its checkpoints, for the backward pass.
Kept = list[tuple[Tensor | None, Tensor]]

#: Modes of a run that are no numbers of pieces: both passes reduce; and forward passes states on in one piece, and backward
#: reduces.
REDUCE, MIXED = 0, -1


# --- Pieces -----------------------------------------------------------------------------------


class Piece(NamedTuple):
    """``width`` channels from ``begin`` on, of ``channels`` in all."""

    begin: int
    width: int
    channels: int

    def state(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.narrow(-2, self.begin, self.width)

    def places(self, given: Arguments) -> Iterator[Tensor | None]:
        """The piece of each tensor of ``given``, which may hold arguments or their gradients. The bounds are left out."""
        for name, x in zip(Arguments._fields[:_DIFFERENTIABLE], given, strict=False):
            if x is None or name == "initial_state":
                yield self.state(x)
            elif name in ("u", "delta", "z"):
                yield x.narrow(1, self.begin, self.width)
            elif x.dim() < 3:
                yield x.narrow(0, self.begin, self.width)
            elif x.shape[1] == 1:
                yield x
            else:  # groups of channels
                size = self.channels // x.shape[1]
                yield x.narrow(1, self.begin // size, self.width // size)

    def of(self, given: Arguments, entered: Tensor | None) -> Arguments:
        *others, _ = self.places(given)
        return Arguments._make((*others, entered, given.cu_seqlens))


def most_pieces(given: Arguments, ranks: int) -> int:
    """The number of pieces to ask ``pieces_of`` for."""
    batch, channels, _ = given.u.shape
    most = max(1, min(PIECES * (ranks - 1), MOST))
    return min(most, max(1, batch * channels // WAVE)) if given.u.is_cuda else most


def pieces_of(given: Arguments, most: int) -> tuple[Piece, ...]:
    """At most so many pieces, each of whole groups of channels."""
    channels = given.u.shape[1]
    unit = math.lcm(
        *(channels // x.shape[1] for x in (given.B, given.C) if x.dim() == 4 and x.shape[1] > 1)
    )
    units = max(1, channels // unit)
    width = unit * -(-units // min(units, most))
    return tuple(
        Piece(begin, min(width, channels - begin), channels)
        for begin in range(0, max(1, channels), width)
    )


def _is_shared(name: str, x: Tensor) -> bool:
    """Whether all channels share this argument, which is B or C then. Each piece has a part of its gradient."""
    return name in ("B", "C") and x.dim() == 4 and x.shape[1] == 1


def _room(name: str, x: Tensor) -> Tensor:
    """Memory for the gradient of an argument; zeros if pieces add to it."""
    if not _is_shared(name, x):
        return torch.empty_like(x)
    return torch.zeros(x.shape, dtype=reference.compute_dtype(x.dtype), device=x.device)


# --- Passes -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """What calls that the ranks agreed on have in common: they share it if nothing is packed, and shapes and options are the
    same.

    mode   the number of pieces that were asked for, ``REDUCE`` or ``MIXED``
    state  the shape of one sequence's state
    """

    members: Members
    terms: Terms
    options: Options
    part: Part
    final: bool
    state: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    mode: int
    pieces: tuple[Piece, ...]
    required: Tier | None

    @property
    def count(self) -> int:
        """The number of elements of one state."""
        return math.prod(self.state)

    @cached_property
    def _opening(self) -> Opening:
        return self._opening_of(self.terms, 2 if self.mode == REDUCE else 0)

    @cached_property
    def backward_opening(self) -> Opening:
        """Where the backward pass reduces, with the summary and the final state's gradient."""
        common = (*self.terms.common, ("create_graph", False))
        terms = Terms(f"{self.terms.operator}'s backward pass", common)
        return self._opening_of(terms, 0 if self.mode > 0 else 2 + self.final)

    def _opening_of(self, terms: Terms, states: int) -> Opening:
        return opening_of(self.members, terms, self.device, states * self.count, self.dtype)

    def open(self, given: Arguments, read: bool) -> Gathered:
        """Open a call that was agreed on before."""
        if self.mode == REDUCE:
            return reduce.exchange(self, self._opening, given, read)
        return Gathered(self._opening.exchange(read=read))

    def gather(self, given: Arguments, read: bool) -> Gathered:
        """Exchange the summaries after an opening that had none."""
        terms = self.terms._replace(operator=f"{self.terms.operator}'s exchange")
        return reduce.exchange(self, self._opening_of(terms, 2), given, read)

    def _of(self, states: Tensor, sequence: int) -> Tensor:
        """The state of one sequence."""
        return states if self.part.bounds is None else states.select(1, sequence)

    def _with(self, states: Tensor | None, sequence: int, state: Tensor) -> Tensor:
        """The states of all sequences, with that of one sequence replaced."""
        if self.part.bounds is None:
            return state
        if states is None:
            count = len(self.part.bounds) - 1
            states = state.new_zeros(state.shape[0], count, *state.shape[1:])
        else:
            states = states.clone()
        states.select(1, sequence).copy_(state)
        return states

    def _only(self, states: Tensor, sequences: tuple[int, ...]) -> Tensor:
        """The states of ``sequences``, and zero for the others."""
        if self.part.bounds is None:
            return states if sequences else torch.zeros_like(states)
        kept = torch.zeros(len(self.part.bounds) - 1, 1, 1, dtype=torch.bool, device="cpu")
        kept[list(sequences)] = True
        return torch.where(kept.to(states.device), states, 0)

    def _receive(
        self, given: Arguments, pieces: Sequence[Piece], sequence: int | None, step: int
    ) -> Iterator[groups.Incoming]:
        """The states that come from the neighbour ``step`` ranks further; none if ``sequence`` is None."""
        if sequence is None:
            return iter(())
        members, device, (batch, _, _) = self.members, given.u.device, given.u.shape
        coming = (
            groups.receive(
                *(members, (batch, piece.width, given.A.shape[1]), self.dtype, device),
                members.rank + step,
            )
            for piece in pieces
        )
        passes_on = self.part.leaves if step < 0 else self.part.enters
        return groups.begun(coming, passes_on is not None)

    def forward(
        self, given: Arguments, training: bool, gathered: Gathered
    ) -> tuple[Tensor, Tensor | None, Kept]:
        """The output, the final state if it is wanted, and each piece's initial states and checkpoints for backward."""
        if self.mode == REDUCE:
            return reduce.forward(self, given, training, gathered)
        part, members = self.part, self.members
        out = None if len(self.pieces) == 1 else torch.empty_like(given.u)
        lasts: list[Tensor] = []
        kept: Kept = []
        coming = self._receive(given, self.pieces, part.enters, -1)
        for piece in self.pieces:
            entered = piece.state(given.initial_state)
            if part.enters is not None:
                entered = self._with(entered, part.enters, next(coming).wait())
            made = plans.forward(piece.of(given, entered), self.options, training)
            if out is None:
                out = made.out
            else:
                out.narrow(1, piece.begin, piece.width).copy_(made.out)
            if part.leaves is not None:
                groups.send(members, self._of(made.last, part.leaves), members.rank + 1)
            lasts.append(made.last)
            kept.append((entered, made.checkpoints))
        groups.finish(members)
        assert out is not None
        if not self.final:
            return out, None, kept
        last = lasts[0] if len(lasts) == 1 else torch.cat(lasts, -2)
        if part.bounds is None:
            return out, groups.broadcast(members, last, members.size - 1), kept
        return out, groups.all_reduce(members, self._only(last, part.ends)), kept

    def backward(
        self,
        given: Arguments,
        kept: Kept,
        out_grad: Tensor | None,
        last_grad: Tensor | None,
        wanted: tuple[bool, ...],
        number: int,
    ) -> tuple[Tensor | None, ...]:
        """The gradients that are wanted on this rank, of the call with this number."""
        part, members, opening = self.part, self.members, self.backward_opening
        if torch.is_grad_enabled():
            error = RuntimeError(
                "selective_scan over ranks has first derivatives only, and create_graph asks for further ones; "
                "scan_registry.distributed.linear_scan has second ones"
            )
            opening.exchange(number, error=error)
        if out_grad is None:
            out_grad = torch.zeros_like(given.u)
        if self.mode <= 0:
            return reduce.backward(self, given, kept, out_grad, last_grad, wanted, number)
        # With packed sequences, another collective follows.
        opening.exchange(number, read=part.bounds is not None)
        behind = None
        if self.final:
            total = groups.all_reduce(members, self._last_grad(given, last_grad))
            behind = self._only(total, part.ends)
        alone = len(self.pieces) == 1
        names = Arguments._fields[:_DIFFERENTIABLE]
        named = zip(names, given.differentiable, wanted, strict=True)
        rooms = [
            None if t is None or not want or alone else _room(name, t) for name, t, want in named
        ]
        found = Arguments._make((*rooms, None))
        needed = (*wanted[:8], part.enters is not None or wanted[8])
        coming = self._receive(given, self.pieces, part.leaves, 1)
        for piece, (entered, checkpoints) in zip(self.pieces, kept, strict=True):
            own = piece.state(behind)
            if part.leaves is not None:
                own = self._with(own, part.leaves, next(coming).wait())
            cut = out_grad.narrow(1, piece.begin, piece.width)
            inputs = piece.of(given, entered)
            exists = tuple(
                want and t is not None
                for want, t in zip(needed, inputs.differentiable, strict=True)
            )
            grads: tuple[Tensor | None, ...] = (None,) * _DIFFERENTIABLE
            if any(exists):
                with policy.as_required(self.required):
                    grads = first_derivative(inputs, checkpoints, cut, own, self.options, exists)
            before = grads[-1]
            if part.enters is not None:
                assert before is not None
                groups.send(members, self._of(before, part.enters), members.rank - 1)
            if before is not None and wanted[8]:
                before = self._only(before, part.begins)
            if alone:
                found = Arguments._make((*grads[:8], before if wanted[8] else None, None))
                break
            found_here = zip(
                names, found.differentiable, piece.places(found), (*grads[:8], before), strict=True
            )
            for name, room, place, grad in found_here:
                if room is not None and place is not None and grad is not None:
                    place.add_(grad) if _is_shared(name, room) else place.copy_(grad)
        groups.finish(members)
        made = zip(found.differentiable, given.differentiable, strict=True)
        return tuple(x if x is None or t is None else x.to(t.dtype) for x, t in made)

    def _last_grad(self, given: Arguments, last_grad: Tensor | None) -> Tensor:
        if last_grad is not None:
            return last_grad
        between = () if self.part.bounds is None else (len(self.part.bounds) - 1,)
        shape = given.u.shape[0], *between, *given.A.shape
        return torch.zeros(shape, dtype=self.dtype, device=given.u.device)


class SelectiveScan(torch.autograd.Function):
    """Saves the arguments, and for each piece its initial states and its checkpoints."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, _, run, gathered = args
        given = Arguments(*tensors)
        number = run.members.session.calls
        out, last, kept = run.forward(given, True, gathered)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, *(each for pair in kept for each in pair))
        ctx.run, ctx.number = run, number
        return out, last

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, last_grad: Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        count = len(Arguments._fields)
        given, kept = Arguments(*tensors[:count]), tensors[count:]
        pairs = list(zip(kept[::2], kept[1::2], strict=True))
        wanted = tuple(ctx.needs_input_grad[:_DIFFERENTIABLE])
        found = ctx.run.backward(given, pairs, out_grad, last_grad, wanted, ctx.number)
        return *found, None, None, None, None
