"""The schedule "reduce" of a selective scan over ranks: all ranks work at the same time.

Forward each rank scans its part twice. The first scan starts from zero and makes the part's summary: the product of the gates,
and the last state. One all-gather exchanges the summaries, which tell each rank the state before its part. The second scan
starts from that state. Both scans work on chunks of the part at once (``selective_chunks``).

Backward nothing is read twice on a GPU. The kernel ``adjoint``, which the backward pass of few channels runs in any case, tells
what the gradient of the state before a part is, for any gradient of the state after it. One all-gather exchanges that, and the
kernel ``backward`` goes on from the right gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.distributed import rows
from scan_registry.distributed import selective_chunks as chunks
from scan_registry.distributed.opening import Opened, Opening
from scan_registry.ops import selective_scan_plans as plans
from scan_registry.ops.derivatives import unobserved
from scan_registry.ops.selective_scan_arguments import Arguments, Options
from scan_registry.ops.selective_scan_derivatives import first_derivative

if TYPE_CHECKING:
    from scan_registry.distributed.selective_run import Kept, Run


class Summary(NamedTuple):
    """What the chunks of this rank's part make of the states before them, (batch, count, channels, states) both."""

    products: Tensor
    totals: Tensor


class Gathered(NamedTuple):
    """The result of an opening: what ranks have exchanged, and of "reduce" this rank's chunks."""

    opened: Opened
    summary: Summary | None = None


# --- Summaries --------------------------------------------------------------------------------


def _summary(given: Arguments, options: Options) -> Summary:
    """That of a forward pass: a scan from zero, whose output is not used."""
    count = chunks.chunk_count(given)
    every = chunks.chunks_of(given._replace(D=None, z=None), count, None)
    totals = plans.forward(every, options, False).last
    products = chunks.decays(chunks.summed_sizes(every, options), given.A)
    return Summary(*(x.unflatten(0, (-1, count)) for x in (products, totals)))


def _backward_summary(
    every: Arguments, checkpoints: Tensor, out_grad: Tensor, options: Options, count: int
) -> tuple[Summary, plans.Adjoints | None]:
    """That of a backward pass, of chunks in the opposite order; and what the kernel has found, if there is one."""
    adjoints = plans.adjoint(every, out_grad, options)
    if adjoints is None:
        # A whole backward pass, for the sake of one of its results.
        of_states = every
        if every.initial_state is None:
            zeros = torch.zeros(
                plans.state_shape(every), dtype=every.A.dtype, device=every.A.device
            )
            of_states = every._replace(initial_state=zeros)
        wanted = (False,) * 8 + (True,)
        totals = first_derivative(of_states, checkpoints, out_grad, None, options, wanted)[8]
        assert totals is not None
        products = chunks.decays(chunks.summed_sizes(every, options), every.A.conj())
    else:
        decays = chunks.decays(adjoints.sizes, every.A)
        totals = chunks.total(decays, adjoints.gradients, backward=True)
        products = chunks.decays(adjoints.sizes.sum(1), every.A)
    both = (x.unflatten(0, (-1, count)) for x in (products, totals))
    return Summary(*both), adjoints


def _write(row: Tensor, summary: Summary, *, backward: bool = False) -> None:
    """Write the summary of all chunks together into a vector."""
    half = row.numel() // 2
    total = chunks.total(*summary, backward=backward)
    row[:half].copy_(summary.products.prod(1).reshape(-1))
    row[half:].copy_(total.reshape(-1))


# --- Forward ----------------------------------------------------------------------------------


def exchange(run: Run, opening: Opening, given: Arguments, read: bool) -> Gathered:
    """Open a call with the ranks' summaries."""

    def make(row: Tensor | None) -> Summary:
        summary = _summary(given, run.options)
        if row is not None:
            _write(row, summary)
        return summary

    return Gathered(*opening.exchange_made(make, read=read))


def forward(
    run: Run, given: Arguments, training: bool, gathered: Gathered
) -> tuple[Tensor, Tensor | None, Kept]:
    """As ``Run.forward``."""
    (opened, summary), members = gathered, run.members
    assert summary is not None
    count, initial = summary.products.shape[1], given.initial_state
    before = initial
    if opened.rows is not None and members.rank:
        before = rows.fold(opened.rows, range(members.rank), initial, run.state)
        assert before is not None
        before = _apart(opened, before)
    entered = before
    if count > 1:
        entered = chunks.entering(*summary, before).flatten(0, 1)
    made = plans.forward(chunks.chunks_of(given, count, entered), run.options, training)
    out, kept = chunks.joined(made.out, count), [(entered, made.checkpoints)]
    if count > 1:  # No view: users could not change a view that a function returns in place.
        out = out.detach()
    if not run.final:
        return out, None, kept
    if opened.rows is None:
        return out, made.last, kept
    last = rows.fold(opened.rows, range(members.size), initial, run.state)
    assert last is not None
    return out, _apart(opened, last), kept


def _apart(opened: Opened, state: Tensor) -> Tensor:
    """A state that was made of the ranks' rows, or NaN if they disagree, in memory of its own: what is a part of the rows would
    keep those of all ranks."""
    return state.clone() if opened.equal is None else opened.guarded(state)


# --- Backward ---------------------------------------------------------------------------------


def backward(
    run: Run,
    given: Arguments,
    kept: Kept,
    out_grad: Tensor,
    last_grad: Tensor | None,
    wanted: tuple[bool, ...],
    number: int,
) -> tuple[Tensor | None, ...]:
    """As ``Run.backward``."""
    ((entered, checkpoints),) = kept
    batch, members, opening = given.u.shape[0], run.members, run.backward_opening
    count = 1 if entered is None or not batch else entered.shape[0] // batch
    size = run.count

    def make(row: Tensor | None) -> tuple[Arguments, Tensor, Summary, plans.Adjoints | None]:
        every = chunks.chunks_of(given, count, entered)
        grad = chunks.chunked(out_grad, count)
        with policy.as_required(run.required):
            found = _backward_summary(every, checkpoints, grad, run.options, count)
        if row is not None:
            _write(row[: 2 * size], found[0], backward=True)
            if run.final:
                _write_grad(row[2 * size :], last_grad)
        return every, grad, *found

    opened, made = opening.exchange_made(make, number, read=False)
    every, grad, summary, adjoints = made
    after = None
    if opened.rows is not None:
        if run.final:
            after = opened.rows[:, 2 * size :].sum(0).view(run.state)
        later = range(members.size - 1, members.rank, -1)
        after = rows.fold(opened.rows, later, after, run.state)
        after = None if after is None else opened.guarded(after)
    if count > 1:
        after = chunks.entering(*summary, after, backward=True).flatten(0, 1)
    grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if any(wanted):
        exists = tuple(
            w and t is not None for w, t in zip(wanted, every.differentiable, strict=True)
        )
        with policy.as_required(run.required):
            if unobserved(*every, grad, after):
                tensors = every, checkpoints, grad, after
                grads = plans.backward(*tensors, run.options, exists, adjoints)
            else:
                grads = first_derivative(every, checkpoints, grad, after, run.options, exists)
    *others, before = chunks.of_whole(grads, given, count)
    if wanted[8] and given.initial_state is not None and (before is None or members.rank):
        before = torch.zeros_like(given.initial_state)
    pairs = zip((*others, before), given.differentiable, strict=True)
    return tuple(x if x is None or t is None else x.to(t.dtype) for x, t in pairs)


def _write_grad(place: Tensor, x: Tensor | None) -> None:
    if x is None:
        place.zero_()
    else:
        place.view(x.shape).copy_(x)
