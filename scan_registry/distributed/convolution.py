"""``causal_conv1d`` of sequences whose time is cut between the ranks of a group.

A rank needs the width-1 steps before its own, its *halo*. They are of the rank before, or of several where parts are short.
So the ranks exchange their *tails*, the last width-1 steps of each part, in the opening of the call, and each picks its halo
among them; how many steps a tail has goes with it. Where the sequence ends in the same tails, its final state is among them.

Backwards, ranks exchange the gradients of their halos, and each adds up those of its tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from scan_registry.dispatch.select import Backend
from scan_registry.distributed.group import (
    Members,
    Terms,
    agree,
    all_reduce,
    open_call,
    resolve,
    session,
)
from scan_registry.ops.arguments import check_bounds
from scan_registry.ops.causal_conv1d_arguments import (
    ACCEPTED,
    Arguments,
    Options,
    check_shape,
    check_tensor,
    normalised,
)
from scan_registry.ops.causal_conv1d_derivatives import convolve

if TYPE_CHECKING:
    from scan_registry.distributed.group import Group

__all__ = ["causal_conv1d"]

_NAME = "distributed.causal_conv1d"


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_state: Literal[False] = False,
    activation: str | None = None,
    backend: Backend = "auto",
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_state: Literal[True],
    activation: str | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_state: bool,
    activation: str | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_state: bool = False,
    activation: str | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``scan_registry.causal_conv1d`` of a sequence of which each rank holds a part: contiguous, in the order of ranks, of
    any length, also 0.

    All ranks of the group have to make the call, and its backward pass if one of them does. The sum of all ranks' losses
    is what is differentiated.

    Args:
        x: (batch, channels, steps), this rank's part; in the dtypes and layouts of ``scan_registry.causal_conv1d``.
        weight: (channels, width), of a width from 2 to 8; the same on all ranks, as ``bias`` is. A rank's gradient of them
            is that of its own steps; the sum over ranks is the whole one, as data parallelism makes it.
        bias: (channels,); None for zeros.
        group: the ranks: a ProcessGroup, or a DeviceMesh of one dimension. None for all ranks.
        initial_state: (batch, channels, width-1), the inputs before the first step of the whole sequence; with
            ``cu_seqlens`` (sequences, channels, width-1). The same on all ranks; gradients are as those of ``weight``.
        seq_idx: (batch, steps) integers within int32, those of this rank's part.
        cu_seqlens: (sequences + 1,), int32 or int64, the bounds of packed sequences in the whole one: 0, …, the sum of all
            ranks' steps. The same on all ranks. The batch is 1 then.
        return_final_state: return the last width-1 inputs of the whole sequence, or of each packed one, too. All ranks
            get them.
        activation: None, or ``"silu"`` or ``"swish"``, which are the same.
        backend: as in ``scan_registry.causal_conv1d``.

    Returns:
        This rank's part of y, and if asked for the final state. Differentiable in x, weight, bias and initial_state, any
        number of times, in reverse mode.

    Raises:
        TypeError, ValueError: as ``scan_registry.causal_conv1d``, on the rank whose argument it is; ``ValueError`` on
            all ranks if shapes, dtypes or options differ between them.
        RuntimeError: another rank had such an error, which the message has; or there is no process group.
        NoKernelError, DriverError: as ``scan_registry.causal_conv1d``.
    """
    y, last = _call(
        (x, weight, bias, initial_state, seq_idx, cu_seqlens),
        (return_final_state, activation, backend),
        group,
    )
    return y if last is None else (y, last)


@_disable_dynamo  # ranks agree on a call when it is made, and not when it is compiled
def _call(
    tensors: tuple[Any, ...], request: tuple[Any, ...], group: Group
) -> tuple[Tensor, Tensor | None]:
    members = resolve(group)
    x = tensors[0]
    device = x.device if isinstance(x, Tensor) else None
    try:
        given, options = _checked(tensors, request)
        terms = _terms(given, options)
    except Exception as error:
        agree(members, error, device)
        raise
    exchange = Exchange(members, terms, given.weight.shape[1] - 1, given.x.shape[:2], options.final)
    x, tail = _Begin.apply(given.x, exchange.slots)  # type: ignore[no-untyped-call]
    halo, last = _Gather.apply(tail, exchange, given.seq_idx, x.shape[-1])  # type: ignore[no-untyped-call]
    given = given._replace(x=x)
    if given.cu_seqlens is not None:
        return _packed(given, options, exchange, halo)
    state = _begin(exchange, members.rank, halo, given.initial_state)
    state = _of_run(exchange, members.rank, given.seq_idx, state)
    if options.final:
        last = _begin(exchange, members.size, last, given.initial_state)
        last = _of_run(exchange, members.size, given.seq_idx, last)
    y, _ = convolve(given._replace(initial_state=state), options._replace(final=False))
    return y, last if options.final else None


# --- Arguments --------------------------------------------------------------------------------


def _checked(tensors: tuple[Any, ...], request: tuple[Any, ...]) -> tuple[Arguments, Options]:
    """As for the local operator, but that bounds and the initial state are those of the whole sequence."""
    x, weight, bias, state, seq_idx, bounds = tensors
    local = None if bounds is not None else state
    given, options = normalised(x, weight, bias, local, seq_idx, None, *request)
    if bounds is None:
        return given, options
    if seq_idx is not None:
        raise ValueError("seq_idx and cu_seqlens are both given; accepted is one of them")
    check_tensor("cu_seqlens", bounds, (torch.int32, torch.int64), x)
    if bounds.dim() != 1 or bounds.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(bounds.shape)}; it must be (sequences + 1,), with one sequence at least"
        )
    if x.shape[0] != 1:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; with cu_seqlens, it must be (1, channels, steps)"
        )
    if state is not None:
        check_tensor("initial_state", state, ACCEPTED, x)
        shape = bounds.shape[0] - 1, x.shape[1], weight.shape[1] - 1
        check_shape("initial_state", state, shape, "(sequences, channels, width - 1)")
        state = state.to(x.dtype).contiguous()
    bounds = bounds.to(torch.int64).contiguous()
    return given._replace(initial_state=state, cu_seqlens=bounds), options


def _terms(given: Arguments, options: Options) -> Terms:
    x, bounds = given.x, given.cu_seqlens
    batch, channels, steps = x.shape
    common = (
        ("batch", batch),
        ("channels", channels),
        ("width", given.weight.shape[1]),
        ("dtype", str(x.dtype).removeprefix("torch.")),
        ("device", x.device.type),
        ("initial_state", given.initial_state is not None),
        ("seq_idx", given.seq_idx is not None),
        ("cu_seqlens", None if bounds is None else _digest(bounds)),
        ("silu", options.silu),
        ("return_final_state", options.final),
        ("gradient of x", torch.is_grad_enabled() and x.requires_grad),
    )
    return Terms(_NAME, common, () if bounds is None else (steps,))


def _digest(bounds: Tensor) -> str:
    """Of the bounds' values where they can be read without waiting for a GPU, else of their number."""
    values = blake2b(bounds.numpy().tobytes(), digest_size=6).hexdigest() if bounds.is_cpu else ""
    return f"{bounds.shape[0]} {values}"


# --- Tails and halos --------------------------------------------------------------------------


@dataclass
class Exchange:
    """One call's exchanges.

    slots    width - 1: of a tail, a halo or a state
    shape    batch and channels
    number   of the call, by which a backward pass is known to be of the same
    valid    (ranks, slots), which slots of the tails hold steps; the last ones
    before   (ranks · slots,), how many steps are in the tails up to and including a slot
    numbers  (ranks · slots, batch), of the tails' sequences, if there is ``seq_idx``
    lengths  of the parts, with packed sequences
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
        """All ranks' tails, (ranks · slots, batch · channels). It is the opening of the call."""
        slots, (batch, _) = self.slots, self.shape
        rows = [tail.new_full((1,), min(steps, slots)), tail.permute(2, 0, 1).flatten()]
        width = 0
        if seq_idx is not None:
            rows.append(_bits(_tail(seq_idx.unsqueeze(1), slots).flatten(), tail.dtype))
            width = rows[-1].numel()
        packed = bool(self.terms.local)
        row = torch.cat(rows).contiguous()
        opened = open_call(self.members, self.terms, tail.device, row, read=packed)
        self.number = session(self.members).calls
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
        """(ranks, tensors, slots, batch · channels) of all ranks' tensors (batch, channels, slots)."""
        terms = Terms(f"{_NAME}, {what}", self.terms.common, (), self.number)
        row = torch.stack([each.permute(2, 0, 1).flatten(1) for each in rows])
        read = False
        opened = open_call(self.members, terms, row.device, row.flatten(), read=read)
        assert opened.rows is not None
        return opened.rows.view(self.members.size, *row.shape)

    def steps_before(self, rank: int) -> Tensor:
        """How many steps are in the tails of the ranks before; if below ``slots``, the number of all steps before."""
        _, before = self.counted
        return before[rank * self.slots - 1] if rank else torch.zeros_like(before[0])

    def ages(self) -> Tensor:
        """How far back each slot's step is, the last being 1."""
        return torch.arange(self.slots, 0, -1, device=self.counted[1].device)

    def place_of(self, rank: int, ages: Tensor) -> Tensor:
        """The place among all tails of the step so far before the part of ``rank``, if there is such a step."""
        _, before = self.counted
        return torch.searchsorted(before, self.steps_before(rank) - ages + 1).clamp(
            max=before.shape[0] - 1
        )

    def picked(self, tails: Tensor, rank: int) -> Tensor:
        """The steps before the part of ``rank``, (batch, channels, slots), with zeros where there are none. The rank
        after the last one stands for the end of the sequence."""
        ages = self.ages()
        found = tails[self.place_of(rank, ages)].T.contiguous().view(*self.shape, self.slots)
        return torch.where(ages <= self.steps_before(rank), found, torch.zeros_like(found))

    def returned(self, grads: Tensor) -> Tensor:
        """The gradient of this rank's tail, from (ranks, 1 or 2, slots, batch · channels): those of the halos, and with
        ``final`` those of the final states."""
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
    """Integers as the bits of floating-point numbers, with which they are sent."""
    return numbers.to(_integers(dtype)).contiguous().view(dtype)


def _tail(x: Tensor, slots: int) -> Tensor:
    """The last steps, after zeros if there are fewer."""
    steps = x.shape[-1]
    kept = x[..., max(0, steps - slots) :]
    return torch.nn.functional.pad(kept, (max(0, slots - steps), 0))


class _Begin(torch.autograd.Function):
    """x and its tail. The tail's gradient is added to that of x in place, which takes no pass over x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        return x.view_as(x), _tail(x, slots).clone()

    @staticmethod
    def backward(ctx: Any, x_grad: Tensor, tail_grad: Tensor) -> Any:
        count = min(x_grad.shape[-1], tail_grad.shape[-1])
        steps = x_grad.shape[-1] - count
        tail_grad = tail_grad[..., tail_grad.shape[-1] - count :]
        if torch.is_grad_enabled():
            return x_grad + torch.nn.functional.pad(tail_grad, (steps, 0)), None
        # The gradient is the convolution's own, and new: nothing else has seen this view of x.
        x_grad[..., steps:] += tail_grad
        return x_grad, None


class _Gather(torch.autograd.Function):
    """This rank's halo, and with ``final`` the last steps of the sequence, of all ranks' tails."""

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
        return _Scatter.apply(halo_grad, last_grad, ctx.exchange), None, None, None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """What ``_Gather`` is the transpose of: the gradient of this rank's tail."""

    @staticmethod
    def forward(ctx: Any, halo_grad: Tensor, last_grad: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        rows = [halo_grad, last_grad] if exchange.final else [halo_grad]
        return exchange.returned(exchange.again("backward", rows))

    @staticmethod
    def backward(ctx: Any, tail_grad: Tensor) -> Any:
        return *_Gather.apply(tail_grad, ctx.exchange, None, None), None  # type: ignore[no-untyped-call]


# --- What precedes a part ---------------------------------------------------------------------


def _begin(exchange: Exchange, rank: int, halo: Tensor, initial: Tensor | None) -> Tensor:
    """The halo, with inputs of the initial state where it reaches back to before the first step."""
    if initial is None:
        return halo
    ages, there = exchange.ages(), exchange.steps_before(rank)
    place = (exchange.slots - ages + there).clamp(max=exchange.slots - 1)
    return torch.where(ages <= there, halo, initial.index_select(-1, place))


def _of_run(exchange: Exchange, rank: int, seq_idx: Tensor | None, state: Tensor) -> Tensor:
    """Zeros for inputs of other runs than that of the step after them, or at the end, of the last step."""
    if exchange.numbers is None or seq_idx is None:
        return state
    ages, there = exchange.ages().flip(0), exchange.steps_before(rank)
    # What precedes all steps belongs to the first one's run.
    numbers = exchange.numbers[exchange.place_of(rank, torch.minimum(ages, there))]
    own = numbers[:1]
    if rank < exchange.members.size and seq_idx.shape[-1]:
        own = seq_idx[:, :1].T.to(numbers.dtype)
    numbers = torch.where(there > 0, numbers, own)
    same = torch.cat([own, numbers[:-1]]) == numbers
    kept = same.to(torch.int64).cumprod(0).to(torch.bool).flip(0)
    return torch.where(kept.T.unsqueeze(1), state, torch.zeros_like(state))


# --- Packed sequences -------------------------------------------------------------------------


class _Part(NamedTuple):
    """Where this rank's steps lie in the whole sequence."""

    first: int
    steps: int


def _packed(
    given: Arguments, options: Options, exchange: Exchange, halo: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Of each packed sequence, what lies in this part, with a state before it."""
    bounds, members = given.cu_seqlens, exchange.members
    assert bounds is not None
    check_bounds(bounds, sum(exchange.lengths))
    part = _Part(sum(exchange.lengths[: members.rank]), exchange.lengths[members.rank])
    state = _packed_states(bounds, part, exchange, halo, given.initial_state)
    local = given._replace(
        initial_state=state, cu_seqlens=(bounds - part.first).clamp(0, part.steps)
    )
    y, last = convolve(local, options)
    if last is None:
        return y, None
    # A sequence's final state is right where its last step is. If it has none, any rank has the initial state.
    ends = bounds[1:] - 1
    mine = (ends >= part.first) & (ends < part.first + part.steps)
    empty = bounds[1:] == bounds[:-1]
    mine = torch.where(empty, torch.full_like(mine, members.rank == 0), mine)
    last = torch.where(mine.view(-1, 1, 1), last, torch.zeros_like(last))
    return y, _Sum.apply(last, exchange)  # type: ignore[no-untyped-call]


def _packed_states(
    bounds: Tensor, part: _Part, exchange: Exchange, halo: Tensor, initial: Tensor | None
) -> Tensor:
    """(sequences, channels, slots). At most one sequence has begun before this part and goes on here."""
    slots, count = exchange.slots, bounds.shape[0] - 1
    base = halo.new_zeros(count, *halo.shape[1:]) if initial is None else initial
    if not part.steps:
        # The halo has a gradient on every rank, or the ranks' backward passes would not meet.
        return base + 0 * halo
    number = torch.searchsorted(bounds, torch.full_like(bounds[:1], part.first), right=True) - 1
    number = number.clamp(0, count - 1)
    there = part.first - bounds[number]
    ages = exchange.ages()
    place = (slots - ages + there).clamp(max=slots - 1)
    before = base.index_select(0, number).index_select(-1, place)
    going_on = torch.where(ages <= there, halo, before)
    sequences = torch.arange(count, device=bounds.device)
    chosen = (sequences == number) & (there > 0)
    return torch.where(chosen.view(-1, 1, 1), going_on, base)


class _Sum(torch.autograd.Function):
    """The sum over ranks, on all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return all_reduce(exchange.members, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        exchange = ctx.exchange
        terms = Terms(f"{_NAME}, final states", exchange.terms.common, (), exchange.number)
        agree(exchange.members, terms, grad.device)
        return _Sum.apply(grad, exchange), None  # type: ignore[no-untyped-call]
