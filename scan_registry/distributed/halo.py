"""Halos: the width-1 steps before a rank's part of time, which its convolution reads.

A halo comes from the rank before, or from several ranks if parts are shorter than width-1 steps. In the opening of a call (see
``opening``), ranks exchange their *tails*, the last steps of each part. The headers say how many steps a tail has, and no rank
reads that on the CPU. Each rank picks its halo from the tails. In the backward pass, ranks exchange the gradients of their
halos, and each rank adds up the gradients that belong to its tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scan_registry.distributed.group import Members
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.opening import Opened, opening_of

__all__ = ["Exchange", "Halo", "of_run", "with_initial"]


@dataclass
class Exchange:
    """The exchanges of one call, forward and backward.

    terms    of the call; the first local number is that of the steps in this rank's tail, and with packed sequences the
             second one that of this rank's steps
    slots    width - 1, the number of steps of a tail, a halo or a state. A tail of fewer steps fills the last slots
    shape    batch and channels
    final    whether the last steps of the whole sequence are wanted
    number   number of the call; ranks compare it in the backward pass
    ages     (slots,), how many steps back the step of each slot is; 1 for the last slot
    before   (ranks · slots,), how many steps are in the tails up to and including a slot
    numbers  (ranks · slots, batch), ``seq_idx`` of the tails' steps, if there is ``seq_idx``
    lengths  lengths of all ranks' parts, with packed sequences
    """

    members: Members
    terms: Terms
    slots: int
    shape: torch.Size
    final: bool
    dtype: torch.dtype
    ages: Tensor
    number: int = 0
    before: Tensor | None = None
    numbers: Tensor | None = None
    lengths: tuple[int, ...] = ()

    def first(self, x: Tensor, seq_idx: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """This rank's halo, and with ``final`` the last steps of the whole sequence, by an exchange of tails in the opening of
        the call."""
        slots, members, packed = self.slots, self.members, len(self.terms.local) > 1
        bits = None
        if seq_idx is not None:
            bits = _bits(_tail(seq_idx.unsqueeze(1), slots).flatten(), self.dtype)
        size, width = slots * prod(self.shape), 0 if bits is None else bits.numel()
        opening = opening_of(members, self.terms, x.device, size + width, self.dtype)

        def make(row: Tensor) -> None:
            self._write(row[:size], [x])
            if bits is not None:
                row[size:].copy_(bits)

        opened = opening.exchange(make, read=packed)
        self.number = members.session.calls
        if packed:
            assert opened.local is not None
            self.lengths = tuple(steps for _, steps in opened.local)
        counts = opened.numbers.to(x.device)
        self.before = (counts[:, :1] >= self.ages).view(-1).cumsum(0)
        if bits is not None and opened.rows is not None:
            numbers = opened.rows[:, size:].contiguous().view(_integers(self.dtype))
            numbers = numbers.view(members.size, self.shape[0], slots)
            self.numbers = numbers.transpose(1, 2).reshape(members.size * slots, -1)
        return self._picked(opened, size)

    def again(self, tail: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The same, once the lengths of tails are known."""
        return self._picked(self._opened("second derivative", [tail]), tail.numel())

    def _opened(self, what: str, rows: Sequence[Tensor | None]) -> Opened:
        """All ranks' tensors ``rows``, each (batch, channels, slots); None for zeros."""
        terms = Terms(f"{self.terms.operator}, {what}", self.terms.common)
        size = len(rows) * self.slots * prod(self.shape)
        opening = opening_of(self.members, terms, self.ages.device, size, self.dtype)
        return opening.exchange(lambda row: self._write(row, rows), self.number, read=False)

    def _write(self, row: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Write the last ``slots`` steps of tensors (batch, channels, steps), after zeros if there are fewer."""
        places = row.view(len(tensors), self.slots, *self.shape).permute(0, 2, 3, 1)
        for place, x in zip(places, tensors, strict=True):
            steps = 0 if x is None else min(x.shape[-1], self.slots)
            if steps < self.slots:
                place.zero_()
            if x is not None and steps:
                place[..., self.slots - steps :].copy_(x[..., x.shape[-1] - steps :])

    # --- Where steps are ---------------------------------------------------------------------

    @property
    def counted(self) -> Tensor:
        """``before``, after the first exchange."""
        assert self.before is not None
        return self.before

    def steps_before(self, rank: int) -> Tensor:
        """How many steps the tails of earlier ranks hold. If fewer than ``slots``, it is the number of all earlier steps."""
        before = self.counted
        return before[rank * self.slots - 1] if rank else torch.zeros_like(before[0])

    def _picked(self, opened: Opened, size: int) -> tuple[Tensor | None, Tensor | None]:
        """The steps before this rank's part, (batch, channels, slots), with zeros where there are none; None before the first
        part. With ``final`` also the last steps of the whole sequence."""
        members, rows = self.members, opened.rows
        if not members.rank and not self.final:
            return None, None
        if rows is None:  # of an empty batch, or no channels
            rows = torch.empty(members.size, 0, dtype=self.dtype, device=self.ages.device)
        tails = rows[:, :size].reshape(members.size * self.slots, -1)

        def picked(rank: int) -> Tensor:
            # How many steps there are before the step of each slot; negative where there is none.
            earlier = self.steps_before(rank) - self.ages
            place = torch.searchsorted(self.counted, earlier, right=True)
            # The kernels take states without gaps.
            steps = tails.index_select(0, place).T.contiguous().view(*self.shape, self.slots)
            return opened.guarded(steps.masked_fill(earlier < 0, 0))

        halo = picked(members.rank) if members.rank else None
        return halo, picked(members.size) if self.final else None

    def scattered(self, halo_grad: Tensor | None, last_grad: Tensor | None) -> Tensor | None:
        """The gradient of this rank's tail, (batch, channels, slots), from all ranks' gradients of halos and, with ``final``,
        of the last steps; None for zero. Slots without steps have any values."""
        rows = [halo_grad, last_grad] if self.final else [halo_grad]
        opened = self._opened("backward", rows)
        members, slots, gathered = self.members, self.slots, opened.rows
        if gathered is None:
            return None
        grads = gathered.view(members.size, len(rows), slots, -1)
        before = self.counted.view(-1, slots)[members.rank :]
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        takers, ends = grads[members.rank + 1 :, 0], before[:-1, -1:]
        if self.final:
            takers = torch.cat([takers.to(wide), grads[:, 1].sum(0, keepdim=True, dtype=wide)])
            ends = before[:, -1:]
        if not takers.shape[0]:
            return None
        # The slot of this rank's steps in each halo; negative for a step that the halo does not reach.
        places = before[0] - ends + (slots - 1)
        index = places.clamp(min=0).unsqueeze(-1).expand_as(takers)
        taken = takers.gather(1, index).masked_fill((places < 0).unsqueeze(-1), 0)
        total = taken[0] if taken.shape[0] == 1 else taken.sum(0, dtype=wide)
        return opened.guarded(total.to(self.dtype)).T.view(*self.shape, slots)


def _integers(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.float64 else torch.int32


def _bits(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers, viewed as floating-point numbers of the same bits, so that they can be sent in one tensor with these."""
    return numbers.to(_integers(dtype)).contiguous().view(dtype)


def _tail(x: Tensor, slots: int) -> Tensor:
    """The last steps, after zeros if there are fewer."""
    steps = x.shape[-1]
    kept = x[..., max(0, steps - slots) :]
    return functional.pad(kept, (max(0, slots - steps), 0))


class Halo(torch.autograd.Function):
    """Exchanges tails. Returns x, this rank's halo, and with ``final`` the last steps of the whole sequence."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: Exchange, seq_idx: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.exchange = exchange
        halo, final_state = exchange.first(x, seq_idx)
        if halo is None:
            halo = x.new_zeros(*exchange.shape, exchange.slots)
        return x.view_as(x), halo, final_state

    @staticmethod
    def backward(ctx: Any, x_grad: Tensor, halo_grad: Tensor, last_grad: Tensor | None) -> Any:
        exchange = ctx.exchange
        steps, slots = x_grad.shape[-1], exchange.slots
        count = min(steps, slots)
        if torch.is_grad_enabled():
            grad: Any = Scatter.apply(halo_grad, last_grad, exchange)  # type: ignore[no-untyped-call]
            return (
                x_grad + functional.pad(grad[..., slots - count :], (steps - count, 0)),
                None,
                None,
            )
        grad_of_tail = exchange.scattered(halo_grad, last_grad)
        if grad_of_tail is not None:
            # In place, so that not all of x is read: the convolution's backward pass has just made this gradient, and nothing
            # else refers to it.
            x_grad[..., steps - count :].add_(grad_of_tail[..., slots - count :])
        return x_grad, None, None


class Scatter(torch.autograd.Function):
    """From gradients of halos to the gradient of this rank's tail."""

    @staticmethod
    def forward(
        ctx: Any, halo_grad: Tensor, last_grad: Tensor | None, exchange: Exchange
    ) -> Tensor:
        ctx.exchange = exchange
        grad_of_tail = exchange.scattered(halo_grad, last_grad)
        return torch.zeros_like(halo_grad) if grad_of_tail is None else grad_of_tail

    @staticmethod
    def backward(ctx: Any, tail_grad: Tensor) -> Any:
        return *Gather.apply(tail_grad, ctx.exchange), None  # type: ignore[no-untyped-call]


class Gather(torch.autograd.Function):
    """The transpose of ``Scatter``: from tails to halos."""

    @staticmethod
    def forward(ctx: Any, tail: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor | None]:
        ctx.exchange = exchange
        halo, final_state = exchange.again(tail)
        return torch.zeros_like(tail) if halo is None else halo, final_state

    @staticmethod
    def backward(ctx: Any, halo_grad: Tensor, last_grad: Tensor | None) -> Any:
        return Scatter.apply(halo_grad, last_grad, ctx.exchange), None  # type: ignore[no-untyped-call]


def with_initial(
    exchange: Exchange, rank: int, halo: Tensor, initial_state: Tensor | None
) -> Tensor:
    """The halo. Steps before the first step of the whole sequence are taken from the initial state."""
    if initial_state is None:
        return halo
    ages, there = exchange.ages, exchange.steps_before(rank)
    place = (exchange.slots - ages + there).clamp(max=exchange.slots - 1)
    return torch.where(ages <= there, halo, initial_state.index_select(-1, place))


def of_run(exchange: Exchange, rank: int, seq_idx: Tensor | None, state: Tensor) -> Tensor:
    """The state, with zeros for steps of another run of ``seq_idx`` than the step that follows the state. At the end of the
    sequence, the run that counts is that of the last step."""
    if exchange.numbers is None or seq_idx is None:
        return state
    ages, there = exchange.ages.flip(0), exchange.steps_before(rank)
    # Steps before the whole sequence belong to the run of its first step.
    place = torch.searchsorted(exchange.counted, (there - ages).clamp(min=0), right=True)
    numbers = exchange.numbers[place.clamp(max=exchange.numbers.shape[0] - 1)]
    own = numbers[:1]
    if rank < exchange.members.size and seq_idx.shape[-1]:
        own = seq_idx[:, :1].T.to(numbers.dtype)
    numbers = torch.where(there > 0, numbers, own)
    same = torch.cat([own, numbers[:-1]]) == numbers
    kept = same.to(torch.int64).cumprod(0).to(torch.bool).flip(0)
    return torch.where(kept.T.unsqueeze(1), state, torch.zeros_like(state))
