"""Scans over the ranks of a group: ranks exchange summaries of their parts, and then all scan at the same time.

A *summary* of a range of steps is the affine map from the state before the steps to the state after them. It is two values for
each element of a state; a *row* is a rank's summary as one vector. One all-gather brings the rows of all ranks to all ranks. From
the rows each rank computes the state that its part starts from, and scans.

The backward pass runs from the last rank to the first, with gradients in place of states. Let h[t] be the gradient that reaches
the state before step t. The gradient before a range of steps is ``product * gradient_behind + gradient_from_zero``, an affine
map again.

``Run`` has what is the same for all operators. A subclass for each operator makes summaries, scans, and computes gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.distributed import group as groups
from scan_registry.distributed import opening, parts
from scan_registry.distributed.group import Members
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.opening import Opened, Opening, opening_of
from scan_registry.distributed.parts import Part
from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.arguments import Options
from scan_registry.ops.call import PLAIN_TYPES

__all__ = ["Call", "Run", "Tensors", "fold", "scan"]

#: The tensors of a call; the last one is the initial state. Also their gradients.
Tensors = tuple["Tensor | None", ...]
Outputs = tuple[Tensor, "Tensor | None"]

_required = policy.required.get
#: Up to so many summaries are composed one by one; more are composed by a scan over ranks.
_FEW = 3


@dataclass(frozen=True)
class Call:
    """A rank's checked arguments.

    tensors  as ``Run`` takes them
    bounds   the values of ``cu_seqlens``, along the time of all ranks; None where nothing is packed
    terms    what ranks compare. The local numbers are this rank's steps, and the gradients that it wants as bits; 0 for none
    run      makes the run from this rank's part, the bounds of sequences in it, and the required tier
    reusable whether later calls with the same shapes and options can take the same run
    """

    tensors: Tensors
    bounds: tuple[int, ...] | None
    terms: Terms
    reverse: bool
    run: Callable[[Part, Tensor | None, Tier | None], Run]
    reusable: bool


@dataclass(frozen=True, eq=False)
class Run(ABC):
    """What calls that the ranks agreed on have in common. Calls without packed sequences share it, if their shapes and
    options are the same.

    shape       shape of this rank's part of the sequence
    one_state   shape of the state of one sequence
    axis        the dimension of sequences in the states of all packed sequences; negative
    compute     dtype of states
    final       whether the caller wants the final state
    bounds      bounds of the sequences in this part; None where nothing is packed
    cu_seqlens  bounds of the sequences along the time of all ranks
    """

    members: Members
    terms: Terms
    options: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    one_state: tuple[int, ...]
    axis: int
    compute: torch.dtype
    final: bool
    reverse: bool
    cu_seqlens: tuple[int, ...] | None
    part: Part
    bounds: Tensor | None
    required: Tier | None

    # --- Of each operator --------------------------------------------------------------------

    @abstractmethod
    def summary(self, tensors: Any, row: Tensor) -> Any:
        """Write the summary of ``part.tail`` into ``row``. The result is for ``scan``."""

    @abstractmethod
    def scan(
        self, tensors: Any, entered: Tensor | None, summary: Any, wants: int
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        """The output, the final states if sequences are packed and final states wanted, and what the backward pass needs to
        make the gradients that this rank wants."""

    @abstractmethod
    def backward_summary(self, saved: Any, out_grad: Tensor, row: Tensor) -> Any:
        """Write the backward pass's summary of ``part.head`` into ``row``. The result is for ``gradients``."""

    @abstractmethod
    def gradients(
        self,
        saved: Any,
        out_grad: Tensor,
        behind: Tensor | None,
        summary: Any,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        """The gradients that are wanted, from that of the output, and that of the states behind this part."""

    def differentiable(
        self,
        saved: Any,
        out_grad: Tensor,
        last_grad: Tensor | None,
        wanted: tuple[bool, ...],
        number: int,
    ) -> Tensors:
        """The gradients that are wanted, differentiable themselves."""
        error = RuntimeError(
            f"{self.terms.operator} over ranks has first derivatives only, and create_graph asks for further ones; "
            "scan_registry.distributed.linear_scan has second ones"
        )
        self.backward_opening.exchange(number=number, error=error)
        raise error

    def zeros(self, saved: Any) -> Tensor:
        """A gradient of zero of the output, which is like the first tensor unless an operator says otherwise."""
        return torch.zeros_like(saved[0])

    # --- Openings ----------------------------------------------------------------------------

    @cached_property
    def count(self) -> int:
        """The number of elements of the state of one sequence."""
        return prod(self.one_state)

    @cached_property
    def _opening(self) -> Opening:
        return self._opening_of(self.terms, 2)

    @cached_property
    def backward_opening(self) -> Opening:
        """The opening of the backward pass. Where nothing is packed, the final state's gradient goes with it."""
        return self._opening_of(self.backward_terms(False), 2 + self._sums_in_opening)

    @property
    def _sums_in_opening(self) -> bool:
        return self.final and self.cu_seqlens is None

    def backward_terms(self, create_graph: bool) -> Terms:
        common = (*self.terms.common, ("create_graph", create_graph))
        return Terms(f"{self.terms.operator}'s backward pass", common)

    def _opening_of(self, terms: Terms, states: int) -> Opening:
        return opening_of(self.members, terms, self.device, states * self.count, self.compute)

    def open(self, tensors: Tensors, read: bool) -> Opened:
        """Open a call with the ranks' summaries."""
        return self._exchange(self._opening, tensors, read)

    def gather(self, tensors: Tensors, read: bool) -> Opened:
        """Exchange the summaries after an opening that had none."""
        terms = self.terms._replace(operator=f"{self.terms.operator}'s exchange")
        return self._exchange(self._opening_of(terms, 2), tensors, read)

    def _exchange(self, first: Opening, tensors: Tensors, read: bool) -> Opened:
        summary = None

        def make(row: Tensor) -> None:
            nonlocal summary
            summary = self.summary(tensors, row)

        with torch.no_grad():
            return first.exchange(make, read=read)._replace(summary=summary)

    # --- States of one sequence and of all ---------------------------------------------------

    @property
    def sequences(self) -> int | None:
        return None if self.part.bounds is None else len(self.part.bounds) - 1

    def states_shape(self) -> list[int]:
        """The shape of the states of all sequences."""
        shape = [*self.one_state]
        if self.sequences is not None:
            shape.insert(len(shape) + 1 + self.axis, self.sequences)
        return shape

    def of_sequence(self, states: Tensor | None, sequence: int) -> Tensor | None:
        """The state of one sequence, out of the states of all packed sequences."""
        if states is None or self.sequences is None:
            return states
        return states.select(self.axis, sequence)

    def with_sequence(self, states: Tensor | None, sequence: int, state: Tensor) -> Tensor:
        """The states of all sequences, with that of one sequence replaced. None stands for zero."""
        if self.sequences is None:
            return state
        states = state.new_zeros(self.states_shape()) if states is None else states.clone()
        states.select(self.axis, sequence).copy_(state)
        return states

    def only(self, states: Tensor, sequences: tuple[int, ...]) -> Tensor:
        """The states of ``sequences``, and zero for the others. Where nothing is packed, the state is kept if ``sequences`` is
        not empty."""
        if self.sequences is None:
            return states if sequences else torch.zeros_like(states)
        kept = torch.zeros(self.sequences, dtype=torch.bool, device="cpu")
        kept[list(sequences)] = True
        along = [1] * states.dim()
        along[self.axis] = self.sequences
        return torch.where(kept.to(states.device).view(along), states, 0)

    def last_grad(self, last_grad: Tensor | None) -> Tensor:
        """The gradient of the final states on this rank."""
        if last_grad is not None:
            return last_grad
        return torch.zeros(self.states_shape(), dtype=self.compute, device=self.device)

    def _ranks(self, positions: range) -> range:
        """The ranks at these positions of the scan, in the same order."""
        if not self.reverse:
            return positions
        last = self.members.size - 1
        return range(last - positions.start, last - positions.stop, -positions.step)

    # --- Both passes -------------------------------------------------------------------------

    def forward(
        self, tensors: Tensors, opened: Opened, wants: int
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        """The output, the final state if it is wanted, and what the backward pass needs for the gradients that this rank
        wants."""
        part, gathered, initial_state = self.part, opened.rows, tensors[-1]
        entered = initial_state
        if part.enters is not None and gathered is not None:
            before = self.of_sequence(initial_state, part.enters)
            carry = fold(gathered, self._ranks(part.earlier), before, self.one_state)
            entered = self.with_sequence(initial_state, part.enters, _own(opened, carry))
        out, final_state, saved = self.scan(tensors, entered, opened.summary, wants)
        if not self.final:
            return out, None, saved
        if self.sequences is not None:
            assert final_state is not None
            return out, groups.all_reduce(self.members, self.only(final_state, part.ends)), saved
        if gathered is None:  # no batches or no channels
            return out, self.last_grad(None), saved
        everyone = self._ranks(range(self.members.size))
        final_state = fold(gathered, everyone, initial_state, self.one_state)
        return out, _own(opened, final_state), saved

    def backward(
        self,
        saved: Tensors,
        out_grad: Tensor,
        last_grad: Tensor | None,
        wanted: tuple[bool, ...],
        number: int,
    ) -> Tensors:
        """The gradients that are wanted on this rank, of the call with this number. Every rank has to call this. The ranks'
        gradients of the final state are summed. The gradient of the initial state is zero on ranks where no sequence's scan
        starts."""
        part, count, summary = self.part, 2 * self.count, None

        def make(row: Tensor) -> None:
            nonlocal summary
            summary = self.backward_summary(saved, out_grad, row[:count])
            if self._sums_in_opening:
                _write(row[count:], last_grad)

        # With packed sequences, another collective follows.
        packed = self.bounds is not None
        opened = self.backward_opening.exchange(make, number, read=packed)
        gathered, total, behind = opened.rows, None, None
        if packed and self.final:
            total = groups.all_reduce(self.members, self.last_grad(last_grad))
        elif self.final and gathered is not None:
            total = gathered[:, count:].sum(0).view(self.one_state)
        if total is not None and (part.leaves is None or packed):
            behind = self.only(total, part.ends)
        if part.leaves is not None and gathered is not None:
            before = self.of_sequence(total, part.leaves)
            last_first = range(part.later.stop - 1, part.later.start - 1, -1)
            carry = fold(gathered, self._ranks(last_first), before, self.one_state)
            behind = self.with_sequence(behind, part.leaves, carry)
        if not any(wanted):
            return (None,) * len(wanted)
        behind = None if behind is None else opened.guarded(behind)
        *others, initial_grad = self.gradients(saved, out_grad, behind, summary, wanted)
        return *others, None if initial_grad is None else self.only(initial_grad, part.begins)


def fold(rows: Tensor, ranks: range, before: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """The state after the steps of ``ranks``, in this order, from their summaries. Its shape is ``shape``.

    ``rows`` are all ranks' summaries, (ranks, 2 · elements) or more. ``before`` is the state before the steps; None is a state
    of zero. The result may be a part of ``rows``.
    """
    count = prod(shape)
    start = None if before is None else before.reshape(-1)
    if len(ranks) <= _FEW:
        for rank in ranks:
            row = rows[rank]
            total = row[count : 2 * count]
            start = total if start is None else torch.addcmul(total, row[:count], start)
        assert start is not None
        return start.view(shape)
    low, high = min(ranks), max(ranks)
    products, totals = rows[low : high + 1, :count], rows[low : high + 1, count : 2 * count]
    # There is no kernel of complex128.
    wide = rows.dtype == torch.complex128 and rows.is_cuda
    options = Options(-2, ranks.step < 0, True, "reference" if wide else "auto")
    _, last = plans.forward(products, totals, start, None, options)
    assert last is not None
    return last.view(shape)


def _own(opened: Opened, state: Tensor) -> Tensor:
    """A state that was made of the ranks' rows, or NaN if they disagree, in memory of its own: a part of the rows would keep
    the rows of all ranks."""
    return state.clone() if opened.equal is None else opened.guarded(state)


def _write(place: Tensor, x: Tensor | None) -> None:
    """Write ``x``, or zeros for None, into a vector."""
    if x is None:
        place.zero_()
    else:
        place.view(x.shape).copy_(x)


# --- Calls ------------------------------------------------------------------------------------


def scan(
    members: Members,
    operator: str,
    tensors: Tensors,
    cu_seqlens: Any,
    options: tuple[Any, ...],
    prepare: Callable[[], Call],
    convert: Callable[[Any], Tensors] = lambda tensors: tensors,
) -> Outputs:
    """The output, and if wanted the final state. Every rank has to call this.

    operator  the function that the user calls
    prepare   checks the arguments, where no call with such arguments has come before
    convert   makes the tensors that ``prepare`` would make of ``tensors``, for arguments like those of a call before
    """
    key = plan = None
    if cu_seqlens is None and all(t is None or type(t) in PLAIN_TYPES for t in tensors):
        key = _key(operator, tensors, options)
        plan = _planned(members, key)
    recording = torch.is_grad_enabled()
    if plan is None:
        with opening.refusals(members, tensors):
            call = prepare()
        run, opened = _agreed(members, call)
        tensors, mine = call.tensors, call.terms.local[1]
        if key is not None and call.reusable:
            members.session.keep(key, (run, mine))
    else:
        run, mine = plan
        tensors = convert(tensors)
        # A rank that wants no gradients records a backward pass if another rank wants some, so it reads the headers.
        opened = run.open(tensors, read=recording and not mine)
    if recording and (mine or any(numbers[1] for numbers in opened.local or ())):
        # If no tensor of this rank requires a gradient, this makes autograd run the rank's backward pass all the same.
        anchor = None if mine else torch.zeros((), device="cpu", requires_grad=True)
        return _Scan.apply(anchor, run, opened, mine, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    with torch.no_grad():
        return run.forward(tensors, opened, 0)[:2]


def _agreed(members: Members, call: Call) -> tuple[Run, Opened]:
    """Agree with the other ranks on the call, and exchange the summaries."""
    terms, bounds = call.terms, call.bounds
    unsure = torch.is_grad_enabled() and not terms.local[1]
    if bounds is None:
        part = parts.whole(members.position(call.reverse), members.size)
        run = call.run(part, None, _required())
        return run, run.open(call.tensors, read=unsure)
    # A summary depends on the lengths of all ranks' parts.
    device = next(t.device for t in call.tensors if t is not None)
    local = opening.agree(members, terms, device)
    lengths = [numbers[0] for numbers in local]
    parts.check_steps(bounds, lengths)
    part = parts.packed(bounds, lengths, members.rank, call.reverse)
    run = call.run(part, torch.tensor(part.bounds, device=device), _required())
    # If another collective follows, the headers have to be read first, so that a failed rank is known.
    opened = run.gather(call.tensors, read=run.final or unsure)
    return run, opened._replace(local=local)


def _key(operator: str, tensors: Tensors, options: tuple[Any, ...]) -> Any:
    """All that ``prepare`` depends on, where nothing is packed."""
    facts = [None if t is None else (t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]
    kinds = [type(option) for option in options]
    return operator, *options, *kinds, *facts, torch.is_grad_enabled(), _required()


def _planned(members: Members, key: Any) -> tuple[Run, int] | None:
    """The run of calls that the ranks have agreed on before, and the gradients that this rank wants."""
    state = members.session
    try:
        plan = state.plans.get(key)
    except TypeError:  # an option without a hash, which is refused later
        return None
    return plan if plan is not None and plan[0].terms.kind in state.agreed else None


class _Scan(torch.autograd.Function):
    """Saves what the backward pass of the operator needs."""

    @staticmethod
    def forward(ctx: Any, _: Any, run: Run, opened: Opened, wants: int, *tensors: Any) -> Outputs:
        ctx.run, ctx.number = run, run.members.session.calls
        out, final_state, saved = run.forward(tensors, opened, wants)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return out, final_state

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, last_grad: Tensor | None) -> Any:
        run, saved, wanted = ctx.run, ctx.saved_tensors, tuple(ctx.needs_input_grad[4:])
        if out_grad is None:
            out_grad = run.zeros(saved)
        backward = run.differentiable if torch.is_grad_enabled() else run.backward
        return *(None,) * 4, *backward(saved, out_grad, last_grad, wanted, ctx.number)
