"""Halos: the width-1 steps before a rank's part of time, which its convolution reads.

A halo comes from the rank before, or from several ranks if parts are shorter than width-1 steps. In the opening of a call (see
``group``), ranks exchange their *tails*, the last steps of each part, together with the number of steps in a tail. Each rank
picks its halo from the tails. In the backward pass, ranks exchange the gradients of their halos, and each rank adds up the
gradients that belong to its tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scan_registry.distributed.group import Members
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.opening import open_call

__all__ = ["Exchange", "Gather", "WithTail", "of_run", "with_initial"]


@dataclass
class Exchange:
    """The exchanges of one call, forward and backward.

    slots    width - 1, the number of steps of a tail, a halo or a state
    shape    batch and channels
    number   number of the call; ranks compare it in the backward pass
    valid    (ranks, slots), which slots of the tails hold steps; a short tail fills the last slots
    before   (ranks · slots,), how many steps are in the tails up to and including a slot
    numbers  (ranks · slots, batch), ``seq_idx`` of the tails' steps, if there is ``seq_idx``
    lengths  lengths of all ranks' parts, with packed sequences
    """

    members: Members
    terms: Terms
    slots: int
    shape: torch.Size
    final: bool
    number: int = 0
    valid: Tensor | None = None
    before: Tensor | None = None
    numbers: Tensor | None = None
    lengths: tuple[int, ...] = ()

    @property
    def counted(self) -> tuple[Tensor, Tensor]:
        """``valid`` and ``before``, after the first exchange."""
        assert self.valid is not None
        assert self.before is not None
        return self.valid, self.before

    def first(self, tail: Tensor, seq_idx: Tensor | None, steps: int) -> Tensor:
        """All ranks' tails, (ranks · slots, batch · channels), exchanged in the opening of the call."""
        slots, (batch, _) = self.slots, self.shape
        rows = [tail.new_full((1,), min(steps, slots)), tail.permute(2, 0, 1).flatten()]
        width = 0
        if seq_idx is not None:
            rows.append(_bits(_tail(seq_idx.unsqueeze(1), slots).flatten(), tail.dtype))
            width = rows[-1].numel()
        packed = bool(self.terms.local)
        row = torch.cat(rows).contiguous()
        opened = open_call(self.members, self.terms, tail.device, row, read=packed)
        self.number = self.members.session.calls
        if packed:
            assert opened.local is not None
            self.lengths = tuple(steps for (steps,) in opened.local)
        found = opened.rows
        assert found is not None
        places = torch.arange(slots, device=tail.device)
        self.valid = places >= slots - found[:, :1].to(torch.int64)
        self.before = self.valid.flatten().cumsum(0)
        if width:
            numbers = found[:, -width:].contiguous().view(_integers(tail.dtype))
            numbers = numbers.view(self.members.size, batch, slots)
            self.numbers = numbers.transpose(1, 2).reshape(-1, batch)
        end = found.shape[1] - width
        return found[:, 1:end].reshape(self.members.size * slots, -1)

    def again(self, what: str, rows: list[Tensor]) -> Tensor:
        """All ranks' tensors ``rows``, each (batch, channels, slots), as (ranks, tensors, slots, batch · channels)."""
        terms = Terms(f"{self.terms.operator}, {what}", self.terms.common, (), self.number)
        row = torch.stack([each.permute(2, 0, 1).flatten(1) for each in rows])
        opened = open_call(self.members, terms, row.device, row.flatten(), read=False)
        assert opened.rows is not None
        return opened.rows.view(self.members.size, *row.shape)

    def steps_before(self, rank: int) -> Tensor:
        """How many steps the tails of earlier ranks hold. If fewer than ``slots``, it is the number of all earlier steps."""
        _, before = self.counted
        return before[rank * self.slots - 1] if rank else torch.zeros_like(before[0])

    def ages(self) -> Tensor:
        """How many steps back the step of each slot is; 1 for the last slot."""
        return torch.arange(self.slots, 0, -1, device=self.counted[1].device)

    def place_of(self, rank: int, ages: Tensor) -> Tensor:
        """Where in all tails the steps are that lie ``ages`` steps before the part of ``rank``, if there are such steps."""
        _, before = self.counted
        return torch.searchsorted(before, self.steps_before(rank) - ages + 1).clamp(
            max=before.shape[0] - 1
        )

    def picked(self, tails: Tensor, rank: int) -> Tensor:
        """The steps before the part of ``rank``, (batch, channels, slots), with zeros where there are none. ``rank`` may
        be the number of ranks: the result is then the last steps of the whole sequence."""
        ages = self.ages()
        found = tails[self.place_of(rank, ages)].T.contiguous().view(*self.shape, self.slots)
        return torch.where(ages <= self.steps_before(rank), found, torch.zeros_like(found))

    def returned(self, grads: Tensor) -> Tensor:
        """The gradient of this rank's tail. ``grads`` are all ranks' gradients of halos, and with ``final`` those of the
        final states: (ranks, 1 or 2, slots, batch · channels)."""
        valid, before = self.counted
        rank, slots = self.members.rank, self.slots
        wide = torch.float64 if grads.dtype == torch.float64 else torch.float32
        takers = grads[rank + 1 :, 0].to(wide)
        ends = before.view(-1, slots)[rank:, -1]
        if self.final:
            takers = torch.cat([takers, grads[:, 1].to(wide).sum(0, keepdim=True)])
        else:
            ends = ends[:-1]
        ages = ends.unsqueeze(1) - before.view(-1, slots)[rank] + 1
        seen = valid[rank] & (ages <= slots)
        index = (slots - ages).clamp(min=0).unsqueeze(-1).expand(-1, -1, takers.shape[-1])
        found = torch.where(seen.unsqueeze(-1), takers.gather(1, index), takers.new_zeros(()))
        return found.sum(0).to(grads.dtype).T.reshape(*self.shape, slots)


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


class WithTail(torch.autograd.Function):
    """x and its tail. The backward pass adds the tail's gradient to that of x in place, which does not read all of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        return x.view_as(x), _tail(x, slots).clone()

    @staticmethod
    def backward(ctx: Any, x_grad: Tensor, tail_grad: Tensor) -> Any:
        count = min(x_grad.shape[-1], tail_grad.shape[-1])
        steps = x_grad.shape[-1] - count
        tail_grad = tail_grad[..., tail_grad.shape[-1] - count :]
        if torch.is_grad_enabled():
            return x_grad + functional.pad(tail_grad, (steps, 0)), None
        # In place: the convolution's backward pass has just made this gradient, and nothing else refers to it.
        x_grad[..., steps:] += tail_grad
        return x_grad, None


class Gather(torch.autograd.Function):
    """Exchanges tails. Returns this rank's halo, and with ``final`` the last steps of the whole sequence."""

    @staticmethod
    def forward(
        ctx: Any, tail: Tensor, exchange: Exchange, seq_idx: Tensor | None, steps: int | None
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        members = exchange.members
        if steps is not None:
            tails = exchange.first(tail, seq_idx, steps)
        else:
            tails = exchange.again("second derivative", [tail]).flatten(0, 2)
        halo = exchange.picked(tails, members.rank)
        last = exchange.picked(tails, members.size) if exchange.final else tail.new_empty(0)
        return halo, last

    @staticmethod
    def backward(ctx: Any, halo_grad: Tensor, last_grad: Tensor) -> Any:
        return Scatter.apply(halo_grad, last_grad, ctx.exchange), None, None, None  # type: ignore[no-untyped-call]


class Scatter(torch.autograd.Function):
    """The transpose of ``Gather``: from gradients of halos to the gradient of this rank's tail."""

    @staticmethod
    def forward(ctx: Any, halo_grad: Tensor, last_grad: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        rows = [halo_grad, last_grad] if exchange.final else [halo_grad]
        return exchange.returned(exchange.again("backward", rows))

    @staticmethod
    def backward(ctx: Any, tail_grad: Tensor) -> Any:
        return *Gather.apply(tail_grad, ctx.exchange, None, None), None  # type: ignore[no-untyped-call]


def with_initial(exchange: Exchange, rank: int, halo: Tensor, initial: Tensor | None) -> Tensor:
    """The halo. Steps before the first step of the whole sequence are taken from the initial state."""
    if initial is None:
        return halo
    ages, there = exchange.ages(), exchange.steps_before(rank)
    place = (exchange.slots - ages + there).clamp(max=exchange.slots - 1)
    return torch.where(ages <= there, halo, initial.index_select(-1, place))


def of_run(exchange: Exchange, rank: int, seq_idx: Tensor | None, state: Tensor) -> Tensor:
    """The state, with zeros for steps of another run of ``seq_idx`` than the step that follows the state. At the end of the
    sequence, the run that counts is that of the last step."""
    if exchange.numbers is None or seq_idx is None:
        return state
    ages, there = exchange.ages().flip(0), exchange.steps_before(rank)
    # Steps before the whole sequence belong to the run of its first step.
    numbers = exchange.numbers[exchange.place_of(rank, torch.minimum(ages, there))]
    own = numbers[:1]
    if rank < exchange.members.size and seq_idx.shape[-1]:
        own = seq_idx[:, :1].T.to(numbers.dtype)
    numbers = torch.where(there > 0, numbers, own)
    same = torch.cat([own, numbers[:-1]]) == numbers
    kept = same.to(torch.int64).cumprod(0).to(torch.bool).flip(0)
    return torch.where(kept.T.unsqueeze(1), state, torch.zeros_like(state))
