"""causal_conv1d in plain torch: what the kernels are tested against, and run when none fits.

Everything is written in differentiable operators, in float32 for the narrow floats. A tensor of taps, x[t-j] for each t,
is formed for one j at a time. Shapes are those of ``problem.py``; ``state`` is the initial state, or None for zeros.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Runs(NamedTuple):
    """Where sequences begin and end: nowhere in between, at the bounds of packed ones, or where ``seq_idx`` changes."""

    seq_idx: Tensor | None = None
    cu_seqlens: Tensor | None = None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are computed in: float32 for the narrow floats."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _numbers(bounds: Tensor, time: int) -> tuple[Tensor, Tensor]:
    """The number of the packed sequence that holds each step, and how many of its steps precede that one."""
    steps = torch.arange(time, device=bounds.device)
    number = torch.searchsorted(bounds, steps, right=True) - 1
    number = number.clamp(0, bounds.shape[0] - 2)
    return number, steps - bounds[number]


def _reach(seq_idx: Tensor, width: int) -> Tensor:
    """How many steps before each one belong to its run, (B, L); ``width`` stands for as many and more. What precedes all
    steps belongs to the first run."""
    same = seq_idx[:, 1:] == seq_idx[:, :-1]
    reach = torch.full_like(seq_idx, width)
    linked = torch.ones_like(seq_idx, dtype=torch.bool)
    for j in range(1, width):
        # Whether the steps t-j+1 and t-j are of one run, and all links after that one.
        link = functional.pad(same, (1, 0), value=True)
        link = functional.pad(link, (j - 1, 0), value=True)[:, : seq_idx.shape[1]]
        reach = torch.where(linked & ~link, reach.new_full((), j - 1), reach)
        linked = linked & link
    return reach


class _Taps:
    """x[t-j] for every t of every channel, and what belongs to that."""

    def __init__(self, x: Tensor, state: Tensor | None, width: int, runs: Runs) -> None:
        self.x, self.width, self.runs = x, width, runs
        self.state = state
        self.time = x.shape[-1]
        self.batch, self.channels = x.shape[:2]
        self.padding: Tensor | None = None
        if runs.cu_seqlens is not None:
            self.number, self.place = _numbers(runs.cu_seqlens, self.time)
        elif runs.seq_idx is not None:
            self.reach = _reach(runs.seq_idx, width).unsqueeze(1)
            self.padding = (runs.seq_idx < 0).unsqueeze(1)

    def padded(self) -> Tensor:
        """The inputs, after those of the state."""
        state = self.state
        if state is None:
            return functional.pad(self.x, (self.width - 1, 0))
        return torch.cat([state, self.x], -1)

    def has(self, j: int) -> Tensor | None:
        """Whether x[t-j] is of the run of t, as far as that depends on t; None where it always is."""
        if self.runs.cu_seqlens is not None:
            return self.place >= j
        return None if self.runs.seq_idx is None else self.reach >= j

    def get(self, j: int) -> Tensor:
        """x[t-j], inputs of states and zeros among them."""
        if self.runs.cu_seqlens is None:
            first = self.width - 1 - j
            taken = self.padded()[..., first : first + self.time]
            has = self.has(j)
            return taken if has is None else torch.where(has, taken, torch.zeros_like(taken))
        shifted = functional.pad(self.x, (j, 0))[..., : self.time]
        if self.state is None:
            return torch.where(self.place >= j, shifted, torch.zeros_like(shifted))
        slot = (self.width - 1 + self.place - j).clamp(0, self.width - 2)
        before = self.state[self.number, :, slot].transpose(0, 1).unsqueeze(0)
        return torch.where(self.place >= j, shifted, before)


def _convolved(taps: _Taps, weight: Tensor, bias: Tensor | None) -> Tensor:
    width = weight.shape[1]
    total = taps.x.new_zeros(()).expand(taps.x.shape)
    if bias is not None:
        total = total + bias.unsqueeze(-1)
    for j in range(width):
        total = total + weight[:, width - 1 - j].unsqueeze(-1) * taps.get(j)
    return total


def _silenced(taps: _Taps, y: Tensor) -> Tensor:
    """Zeros at steps of padding."""
    return y if taps.padding is None else torch.where(taps.padding, torch.zeros_like(y), y)


def _wide(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    runs: Runs,
    silu: bool,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """y, and if it is wanted the final state, in the dtype of x."""
    compute = compute_dtype(x.dtype)
    inputs = x.to(compute), _wide(state, compute)
    taps = _Taps(*inputs, weight.shape[1], runs)
    pre = _convolved(taps, weight.to(compute), _wide(bias, compute))
    y = _silenced(taps, functional.silu(pre) if silu else pre).to(x.dtype)
    return y, final_state(taps).to(x.dtype) if final else None


def _ends(taps: _Taps) -> tuple[Tensor, Tensor, Tensor]:
    """Of every slot of the final states of packed sequences: the step whose input it holds, clamped; the slot of the
    initial state; and whether it is a step."""
    bounds = taps.runs.cu_seqlens
    assert bounds is not None
    slots = torch.arange(taps.width - 1, device=bounds.device)
    place = (bounds[1:] - bounds[:-1]).unsqueeze(1) + slots - (taps.width - 1)
    step = (bounds[:-1].unsqueeze(1) + place).clamp(0, max(0, taps.time - 1))
    return step, (place + taps.width - 1).clamp(0, taps.width - 2), place >= 0


def final_state(taps: _Taps) -> Tensor:
    """The last width - 1 inputs of the last run, or of each packed sequence."""
    count = taps.width - 1
    if taps.runs.cu_seqlens is None:
        last = taps.padded()[..., taps.time :]
        if taps.runs.seq_idx is None or taps.time == 0:
            return last.clone()
        age = torch.arange(count - 1, -1, -1, device=last.device)
        return torch.where(taps.reach[..., -1:] >= age, last, torch.zeros_like(last))
    step, slot, inside = _ends(taps)
    sequences = torch.arange(step.shape[0], device=step.device).unsqueeze(1)
    if taps.state is None:
        before = taps.x.new_zeros(step.shape[0], taps.channels, count)
    else:
        before = taps.state[sequences, :, slot].transpose(1, 2)
    if taps.time == 0:
        return before.clone()
    last_inputs = taps.x[0][:, step].transpose(0, 1)
    return torch.where(inside.unsqueeze(1), last_inputs, before)


class Gradients(NamedTuple):
    """Of x, weight, bias and the initial state, in the dtype of the computation; the state's also where there is none."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    state: Tensor


def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    y_grad: Tensor,
    final_grad: Tensor | None,
    runs: Runs,
    silu: bool,
) -> Gradients:
    """The gradients of ``forward``."""
    compute = compute_dtype(x.dtype)
    width, weight = weight.shape[1], weight.to(compute)
    inputs = x.to(compute), _wide(state, compute)
    taps = _Taps(*inputs, width, runs)
    g, last = y_grad.to(compute), _wide(final_grad, compute)
    if silu:
        pre = _convolved(taps, weight, _wide(bias, compute))
        sigma = torch.sigmoid(pre)
        g = g * (sigma * (1 + pre * (1 - sigma)))
    g = _silenced(taps, g)
    weight_grad = torch.stack([(g * taps.get(width - 1 - i)).sum((0, 2)) for i in range(width)], -1)
    back = _packed_back if runs.cu_seqlens is not None else _back
    x_grad, state_grad = back(taps, weight, g, last)
    return Gradients(x_grad, weight_grad, g.sum((0, 2)), state_grad)


def _pulled(taps: _Taps, weight: Tensor, g: Tensor, j: int) -> Tensor:
    """What reaches x[t-j] from each t."""
    pulled = weight[:, taps.width - 1 - j].unsqueeze(-1) * g
    has = taps.has(j)
    return pulled if has is None else torch.where(has, pulled, torch.zeros_like(pulled))


def _back(taps: _Taps, weight: Tensor, g: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
    count = taps.width - 1
    total = g.new_zeros(taps.batch, taps.channels, count + taps.time)
    for j in range(taps.width):
        total = total + functional.pad(_pulled(taps, weight, g, j), (count - j, j))
    if last is not None:
        if taps.runs.seq_idx is not None and taps.time:
            age = torch.arange(count - 1, -1, -1, device=g.device)
            last = torch.where(taps.reach[..., -1:] >= age, last, torch.zeros_like(last))
        total = total + functional.pad(last, (taps.time, 0))
    return total[..., count:], total[..., :count]


def _packed_back(
    taps: _Taps, weight: Tensor, g: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gathers only, so that sums have a fixed order on a GPU, too."""
    bounds, width, time = taps.runs.cu_seqlens, taps.width, taps.time
    assert bounds is not None
    count, length = width - 1, bounds[1:] - bounds[:-1]
    x_grad = torch.zeros_like(g)
    state_grad = g.new_zeros(len(length), taps.channels, count)
    if time:
        for j in range(width):
            x_grad = x_grad + functional.pad(_pulled(taps, weight, g, j), (0, j))[..., j:]
        # The first steps of each sequence, (S, D, W-1).
        steps = torch.arange(count, device=g.device)
        early = g[0][:, (bounds[:-1].unsqueeze(1) + steps).clamp(0, time - 1)].transpose(0, 1)
        early = torch.where(
            (steps < length.unsqueeze(1)).unsqueeze(1), early, torch.zeros_like(early)
        )
        columns = []
        for q in range(count, 0, -1):  # steps before the sequence
            parts = [weight[:, count - j] * early[..., j - q] for j in range(q, width)]
            columns.append(torch.stack(parts).sum(0))
        state_grad = torch.stack(columns, -1)
    else:
        # Zeros, but connected to ``g`` and ``weight`` in autograd's graph: a rank without steps must join the
        # collectives of the second derivative.
        state_grad = state_grad + g.sum((0, 2)).unsqueeze(1) * weight[:, 1:]
    if last is not None:
        if time:
            slot = count - (length[taps.number] - taps.place)
            arriving = last[taps.number, :, slot.clamp(0, count - 1)].transpose(0, 1)
            x_grad = x_grad + torch.where(slot >= 0, arriving, torch.zeros_like(arriving))
        slots = torch.arange(count, device=g.device)
        kept = slots - length.unsqueeze(1)
        index = kept.clamp(0, count - 1).unsqueeze(1).expand(-1, taps.channels, -1)
        arriving = last.gather(2, index)
        state_grad = state_grad + torch.where(
            (kept >= 0).unsqueeze(1), arriving, torch.zeros_like(arriving)
        )
    return x_grad, state_grad


class UpdateRows(NamedTuple):
    """Which rows of a state sequences read and write, and how the rows are laid out.

    positions     how many inputs came before, of rows that are rings
    indices       the row that each sequence reads; that of its own number if None
    destinations  the row that each sequence writes; the one that it reads if None
    cu_seqlens    bounds of sequences that are packed along the time of one batch
    accepted      how many of the last call's steps count, of rows that keep drafts
    pad_slot_id   an index that stands for no row, as negative ones do
    """

    positions: Tensor | None = None
    indices: Tensor | None = None
    destinations: Tensor | None = None
    cu_seqlens: Tensor | None = None
    accepted: Tensor | None = None
    pad_slot_id: int = -1

    def alone(self, number: int, slots: int, device: Any) -> UpdateRows:
        """Those of one packed sequence, by itself, with -1 where there is no row. ``pad_slot_id`` stands for indices that are
        passed, and not for the number of a sequence without any."""

        def own(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[number : number + 1]

        read, written = own(self.indices), own(self.destinations)
        return UpdateRows(
            own(self.positions),
            torch.tensor([number], device=device)
            if read is None
            else self.of(read, 1, slots, device),
            None if written is None else self.of(written, 1, slots, device),
            accepted=own(self.accepted),
        )

    def of(self, indices: Tensor | None, sequences: int, slots: int, device: Any) -> Tensor:
        """Row numbers, -1 where there is none."""
        if indices is None:
            return torch.arange(sequences, device=device)
        rows = indices.long()
        return rows.masked_fill((rows < 0) | (rows >= slots) | (rows == self.pad_slot_id), -1)


def update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: UpdateRows,
    silu: bool,
) -> Tensor:
    """y for the steps of x, (B, D, T); ``state``, (slots, D, length), is changed in place. With ``cu_seqlens``, which are
    read, x is (1, D, T)."""
    if rows.cu_seqlens is None:
        return _update(x, state, weight, bias, rows, silu)
    y, bounds = torch.zeros_like(x), rows.cu_seqlens.tolist()
    before = state.clone()
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        own = rows.alone(number, state.shape[0], x.device)
        part = x[..., start:end]
        y[..., start:end] = _update(part, state, weight, bias, own, silu, before)
    return y


def _update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: UpdateRows,
    silu: bool,
    before: Tensor | None = None,
) -> Tensor:
    """Likewise, of sequences of one length each. They read ``before``, or else the state."""
    compute, width, (batch, channels, time) = compute_dtype(x.dtype), weight.shape[1], x.shape
    slots, _, length = state.shape
    device = x.device
    rows = how.of(how.indices, batch, slots, device)
    there = rows >= 0
    states = (state if before is None else before)[rows.clamp(min=0)]
    ages = torch.arange(1 - width, 0, device=device)
    following = states.new_full((batch,), length, dtype=torch.long)
    if how.positions is not None:
        following = how.positions.long()
    elif how.accepted is not None:
        following = how.accepted.long().clamp(1, length - width + 2) + width - 2
    at = (following.unsqueeze(1) + ages).remainder(length).unsqueeze(1).expand(-1, channels, -1)
    taps = _Taps(x.to(compute), states.gather(2, at).to(compute), width, Runs())
    pre = _convolved(taps, weight.to(compute), _wide(bias, compute))
    y = (functional.silu(pre) if silu else pre).to(x.dtype)
    y = torch.where(there.view(-1, 1, 1), y, torch.zeros_like(y))
    written = rows if how.destinations is None else how.of(how.destinations, batch, slots, device)
    stored = there & (written >= 0)
    if how.accepted is not None:
        history = states.gather(2, at[..., 1:])
        entering = torch.cat([history, x], 2)[..., :length]
        left = state[written.clamp(min=0)][..., entering.shape[2] :]
        new = torch.cat([entering, left], 2)
    elif how.positions is None:
        new = torch.cat([states, x], 2)[..., time:]
    else:
        kept = min(time, length)
        steps = torch.arange(time - kept, time, device=device)
        at = (following.unsqueeze(1) + steps).remainder(length)
        new = states.scatter(2, at.unsqueeze(1).expand(-1, channels, -1), x[..., time - kept :])
    if how.indices is None and how.destinations is None:
        state.copy_(new)
    else:
        state.index_copy_(0, written[stored], new[stored])
    return y
