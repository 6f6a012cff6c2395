"""The two schedules of ``linear_scan`` on one rank, forward and backward.

"reduce"  Each rank computes a summary of its part. One all-gather brings all summaries to all ranks. From the summaries
          each rank computes the state that its part starts from, and scans.
"pass"    Each rank scans its channels in pieces. A piece starts when the state before it has come from the rank before.
          As soon as the piece is done, its last state goes to the next rank.

The backward pass of either schedule runs from the last rank to the first, with gradients in place of states. Nothing here is
recorded for derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from scan_registry.dispatch.fit import Tier
from scan_registry.distributed import group as groups
from scan_registry.distributed import rows
from scan_registry.distributed.cost import piece_width
from scan_registry.distributed.decision import axis_of
from scan_registry.distributed.group import Members
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.into import backward_into, forward_into
from scan_registry.distributed.opening import Opened, Opening, opening_of
from scan_registry.distributed.parts import Part
from scan_registry.distributed.pieces import Piece
from scan_registry.kernels.linear_scan.reference import compute_dtype, state_shape
from scan_registry.ops.arguments import Options
from scan_registry.ops.derivatives import first_derivative, scan

#: The gradients of gates, tokens and the initial state.
Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]


@dataclass(frozen=True, eq=False)
class Run:
    """What calls that the ranks agreed on have in common. Calls without packed sequences share it, if their shapes and
    options are the same.

    options     options of the scan; ``final`` is whether the caller wants the final state
    shape       shape of this rank's states
    pieces      number of pieces of "pass", or 0 for "reduce"
    cu_seqlens  bounds of the sequences along the time of all ranks; None where nothing is packed
    bounds      bounds of the sequences in this part
    """

    members: Members
    terms: Terms
    options: Options
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    part: Part
    pieces: int
    cu_seqlens: tuple[int, ...] | None = None
    bounds: Tensor | None = None
    required: Tier | None = None

    # --- Shapes ------------------------------------------------------------------------------

    @cached_property
    def one_state(self) -> tuple[int, ...]:
        """The shape of the state of one sequence."""
        return state_shape(self.shape, self.options.dim % len(self.shape), None)

    @cached_property
    def compute(self) -> torch.dtype:
        return compute_dtype(self.dtype)

    @cached_property
    def count(self) -> int:
        """The number of elements of the state of one sequence."""
        return prod(self.one_state)

    @property
    def sequences(self) -> int | None:
        return None if self.part.bounds is None else len(self.part.bounds) - 1

    def _ranks(self, positions: range) -> range:
        """The ranks at these positions of the scan, in the same order."""
        if not self.options.reverse:
            return positions
        last = self.members.size - 1
        return range(last - positions.start, last - positions.stop, -positions.step)

    def _neighbour(self, step: int) -> int:
        """The rank ``step`` positions further in scan order. The caller makes sure that there is one."""
        return self.members.rank + (-step if self.options.reverse else step)

    # --- Openings ----------------------------------------------------------------------------

    @cached_property
    def _opening(self) -> Opening:
        """The opening of calls that were agreed on before. "reduce" sends its summary with it."""
        count = 0 if self.pieces else 2 * self.count
        return opening_of(self.members, self.terms, self.device, count, self.compute)

    @cached_property
    def _backward_opening(self) -> Opening:
        """The opening of the backward pass. Where nothing is packed, "reduce" sends the final state's gradient with it."""
        rows = 0 if self.pieces else 3 if self._sums_in_opening else 2
        terms = self.backward_terms(False)
        return opening_of(self.members, terms, self.device, rows * self.count, self.compute)

    @property
    def _sums_in_opening(self) -> bool:
        return self.options.final and self.cu_seqlens is None

    @cached_property
    def _summary_options(self) -> Options:
        dim, reverse, _, backend = self.options
        # No Triton kernel computes summaries.
        return Options(dim, reverse, False, "reference" if backend == "reference" else "auto")

    def open(self, gates: Tensor, tokens: Tensor, read: bool) -> Opened:
        """Open a call that was agreed on before."""
        return self._exchange(self._opening, gates, tokens, read)

    def gather(self, gates: Tensor, tokens: Tensor, read: bool) -> Opened:
        """Exchange the summaries after an opening that had none."""
        terms = self.terms._replace(operator=f"{self.terms.operator}'s exchange")
        opening = opening_of(self.members, terms, self.device, 2 * self.count, self.compute)
        return self._exchange(opening, gates, tokens, read)

    def _exchange(self, opening: Opening, gates: Tensor, tokens: Tensor, read: bool) -> Opened:
        def make(row: Tensor | None) -> None:
            if row is not None:
                rows.forward_row(row, gates, tokens, self._summary_options, self.part.tail)

        return opening.exchange_made(make, read=read)[0]

    # --- States of one sequence and of all ---------------------------------------------------

    def of_sequence(self, states: Tensor | None, sequence: int | None) -> Tensor | None:
        """The state of one sequence, out of the states of all packed sequences."""
        if states is None or self.sequences is None or sequence is None:
            return states
        return states.select(self.options.dim, sequence)

    def with_sequence(
        self, states: Tensor | None, sequence: int | None, state: Tensor | None
    ) -> Tensor | None:
        """The states of all sequences, with that of one sequence replaced. None stands for zero in ``states`` and ``state``."""
        if sequence is None:
            return states
        if self.sequences is None:
            return state
        if states is None:
            if state is None:
                return None
            of_all = [*state.shape]
            of_all.insert(len(of_all) + 1 + self.options.dim, self.sequences)
            states = state.new_zeros(of_all)
        else:
            states = states.clone()
        place = states.select(self.options.dim, sequence)
        if state is None:
            place.zero_()
        else:
            place.copy_(state)
        return states

    def only(self, states: Tensor, sequences: tuple[int, ...]) -> Tensor:
        """The states of ``sequences``, and zero for the others. Where nothing is packed, the state is kept if ``sequences`` is
        not empty."""
        if self.sequences is None:
            return states if sequences else torch.zeros_like(states)
        kept = torch.zeros(self.sequences, dtype=torch.bool, device="cpu")
        kept[list(sequences)] = True
        along = [1] * states.dim()
        along[self.options.dim] = self.sequences
        return torch.where(kept.to(states.device).view(along), states, 0)

    # --- Forward -----------------------------------------------------------------------------

    def forward(
        self,
        gates: Tensor,
        tokens: Tensor,
        initial: Tensor | None,
        opened: Opened,
        keep: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The states, the final state if it is wanted, and with ``keep`` the states that this part started from."""
        part, gathered = self.part, opened.rows
        if gathered is None:
            states, last, entered = self._pass_forward(gates, tokens, initial, keep)
        else:
            entered = initial
            if part.enters is not None:
                before = self.of_sequence(initial, part.enters)
                carry = rows.fold(gathered, self._ranks(part.earlier), before, self.one_state)
                if carry is not None and part.earlier:
                    carry = opened.guarded(carry)
                entered = self.with_sequence(initial, part.enters, carry)
            states, last = self._scan(gates, tokens, entered)
        if not self.options.final:
            return states, None, entered
        if self.sequences is not None:
            assert last is not None
            return states, groups.all_reduce(self.members, self.only(last, part.ends)), entered
        if gathered is None:
            assert last is not None
            source = self.members.rank_at(self.members.size - 1, self.options.reverse)
            return states, groups.broadcast(self.members, last, source), entered
        everyone = self._ranks(range(self.members.size))
        last = rows.fold(gathered, everyone, initial, self.one_state)
        assert last is not None
        # An output of its own, and no part of what was gathered.
        own = last.clone() if opened.equal is None else opened.guarded(last)
        return states, own, entered

    def _scan(
        self, gates: Tensor, tokens: Tensor, entered: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        wanted = self.options.final and self.sequences is not None
        how = self.options._replace(final=wanted)
        return scan(gates, tokens, entered, self.bounds, how)

    def _pass_forward(
        self, gates: Tensor, tokens: Tensor, initial: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        part, how = self.part, self.options._replace(final=True)
        states, carries, lasts = torch.empty_like(tokens), [], []
        pieces = self.channels
        coming = self._receive(pieces, part.enters, -1)
        for piece in pieces:
            entered = piece.state(initial)
            if part.enters is not None:
                carry = next(coming).wait()
                entered = self.with_sequence(entered, part.enters, carry)
                carries.append(carry)
            inputs = piece.sequence(gates), piece.sequence(tokens)
            last = forward_into(piece.sequence(states), *inputs, entered, self.bounds, how)
            assert last is not None
            lasts.append(last)
            self._send(self.of_sequence(last, part.leaves), part.leaves, 1)
        groups.finish(self.members)
        entered = initial
        if carries and keep:
            carry = _joined(carries, self.axis_of_state)
            entered = self.with_sequence(initial, part.enters, carry)
        last = _joined(lasts, self.axis_of_states) if self.options.final else None
        return states, last, entered

    def _receive(
        self, pieces: Sequence[Piece], sequence: int | None, step: int
    ) -> Iterator[groups.Incoming]:
        """The states that come from the rank ``step`` positions further; none if ``sequence`` is None."""
        if sequence is None:
            return iter(())
        source = self._neighbour(step)
        coming = (
            groups.receive(self.members, self._shape(piece), self.compute, self.device, source)
            for piece in pieces
        )
        passes_on = self.part.leaves if step < 0 else self.part.enters
        return groups.begun(coming, passes_on is not None)

    def _shape(self, piece: Piece) -> list[int]:
        """The shape of one sequence's state in a piece."""
        shape = [*self.one_state]
        if piece.axis is not None:
            shape[self.axis_of_state()] = piece.count
        return shape

    def _send(self, state: Tensor | None, sequence: int | None, step: int) -> None:
        if sequence is not None:
            assert state is not None
            groups.send(self.members, state, self._neighbour(step))

    # --- Backward ----------------------------------------------------------------------------

    def backward(
        self,
        gates: Tensor,
        states: Tensor | None,
        entered: Tensor | None,
        states_grad: Tensor,
        last_grad: Tensor | None,
        wanted: tuple[bool, bool, bool],
        number: int,
    ) -> Gradients:
        """The gradients that are wanted on this rank, of the call with this number. Every rank has to call this. The ranks'
        gradients of the final state are summed. The gradient of the initial state is zero on ranks where no sequence's scan
        starts."""
        part, opening, count = self.part, self._backward_opening, 2 * self.count

        def make(row: Tensor | None) -> None:
            if row is None:
                return
            options = self._summary_options
            rows.backward_row(row[:count], gates, states_grad, options, part.head)
            if self._sums_in_opening:
                _write(row[count:], last_grad)

        # With packed sequences, another collective follows.
        opened, _ = opening.exchange_made(make, number, read=self.bounds is not None)
        if opened.rows is not None and self._sums_in_opening:
            last_grad = opened.rows[:, count:].sum(0).view(self.one_state)
        elif self.options.final:
            last_grad = groups.all_reduce(self.members, self.last_grad(last_grad, states_grad))
        behind = None
        if last_grad is not None and (part.leaves is None or self.sequences is not None):
            behind = self.only(last_grad, part.ends)
        tensors = gates, states, states_grad, entered
        if opened.rows is None:
            found = self._pass_backward(*tensors, behind, wanted)
        else:
            if part.leaves is not None:
                before = self.of_sequence(last_grad, part.leaves)
                last = range(part.later.stop - 1, part.later.start - 1, -1)
                carry = rows.fold(opened.rows, self._ranks(last), before, self.one_state)
                behind = self.with_sequence(behind, part.leaves, carry)
            found = None, None, None
            if any(wanted):
                behind = None if behind is None else opened.guarded(behind)
                given = *tensors, behind, self.bounds
                found = first_derivative(given, self.options, wanted, self.required)
        gates_grad, tokens_grad, initial_grad = found
        if initial_grad is not None:
            initial_grad = self.only(initial_grad, part.begins)
        return gates_grad, tokens_grad, initial_grad

    def backward_terms(self, create_graph: bool) -> Terms:
        common = (*self.terms.common, ("create_graph", create_graph))
        return Terms(f"{self.terms.operator}'s backward pass", common)

    def last_grad(self, last_grad: Tensor | None, like: Tensor) -> Tensor:
        if last_grad is not None:
            return last_grad
        shape = state_shape(self.shape, self.options.dim % len(self.shape), self.sequences)
        return torch.zeros(shape, dtype=self.compute, device=like.device)

    def _pass_backward(
        self,
        gates: Tensor,
        states: Tensor | None,
        states_grad: Tensor,
        entered: Tensor | None,
        behind: Tensor | None,
        wanted: tuple[bool, bool, bool],
    ) -> Gradients:
        part = self.part
        of_gates, of_tokens, initials = None, None, []
        broadcast = gates.shape != states_grad.shape
        if wanted[0]:
            # Gates may broadcast along the dimension that is cut into pieces: each piece then adds its part of the gradient.
            of_gates = torch.empty_like(gates)
            if broadcast:
                of_gates = torch.zeros(gates.shape, dtype=self.compute, device=gates.device)
        if wanted[1]:
            of_tokens = torch.empty_like(states_grad if states is None else states)
        pieces = self.channels
        coming = self._receive(pieces, part.leaves, 1)
        for piece in pieces:
            own = piece.state(behind)
            if part.leaves is not None:
                carry = next(coming).wait()
                own = self.with_sequence(own, part.leaves, carry)
            initial_grad = backward_into(
                None if of_gates is None else piece.sequence(of_gates),
                None if of_tokens is None else piece.sequence(of_tokens),
                piece.sequence(gates),
                None if states is None else piece.sequence(states),
                piece.sequence(states_grad),
                piece.state(entered),
                own,
                self.bounds,
                self.options,
                self.required,
                add=broadcast,
            )
            self._send(self.of_sequence(initial_grad, part.enters), part.enters, -1)
            if wanted[2]:
                initials.append(initial_grad)
        groups.finish(self.members)
        return (
            None if of_gates is None else of_gates.to(gates.dtype),
            of_tokens,
            _joined(initials, self.axis_of_states) if wanted[2] else None,
        )

    # --- Pieces ------------------------------------------------------------------------------

    def axis(self) -> int:
        axis = axis_of(self.shape, self.options.dim)
        assert axis is not None
        return axis

    def axis_of_state(self) -> int:
        """The dimension that is cut into pieces, in the state of one sequence; negative."""
        axis = self.axis()
        return axis if axis > self.options.dim else axis + 1

    def axis_of_states(self) -> int:
        """The dimension that is cut into pieces, in the states of all sequences; negative."""
        return self.axis_of_state() if self.sequences is None else self.axis()

    @cached_property
    def channels(self) -> tuple[Piece, ...]:
        """The pieces; a single one if time is the only dimension."""
        if len(self.shape) == 1:
            return (Piece(None, 0, 0, 1),)
        axis = self.axis()
        size = self.shape[axis]
        # With "reduce" the number of pieces is 0. If there are no channels or no batches, there are no summaries either, and
        # the states, which are empty, are passed on in one piece.
        width = piece_width(size, max(1, self.pieces), self.dtype.itemsize)
        return tuple(
            Piece(axis, self.axis_of_states(), begin, min(width, size - begin))
            for begin in range(0, max(1, size), width)
        )


def _joined(pieces: list[Tensor], axis: Callable[[], int]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis())


def _write(place: Tensor, x: Tensor | None) -> None:
    """Write ``x``, or zeros for None, into a vector."""
    if x is None:
        place.zero_()
    else:
        place.view(x.shape).copy_(x)
