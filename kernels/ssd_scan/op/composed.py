"""``ssd_scan`` in its chunked form, composed of torch's matrix products.

This runs what no kernel takes: float64, the CPU, derivatives of derivatives, forward mode and ``torch.func``. A chunk
of a sequence is some products of matrices: C·Bᵀ with the decay from step to step, times δ·x; C times the state before the chunk;
and the chunk's own part of the state after it. A loop over the chunks hands the states on. Decays are exponents of differences of
cumulative sums, taken in float64, since a difference may be far smaller than the sums.

Of packed sequences, each begins a chunk. Chunk k of sequence s is slot ``cu_seqlens[s] // L + s + k`` of ``T // L + sequences``, for
chunks of L steps, as in the kernels. So shapes do not depend on the values of ``cu_seqlens``, which only the device reads. Steps of
a slot that no sequence fills have δ = 0 and x = 0: they leave the state as it is. ``T // L`` slots begin no sequence. Only before
those are states computed, so that many sequences of few steps take little memory; and after sequences, if asked for.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from scan_registry.kernels.ssd_scan import reference
from scan_registry.kernels.ssd_scan.op.arguments import DIFFERENTIABLE, Arguments, Options
from scan_registry.ops.recomputation import Pairs, gradients

#: Steps of a chunk, if the caller does not say: a CPU is fastest with few, as decays are a matrix of so many squared. Packed
#: sequences that are shorter in the mean have chunks of about their length, since each fills one at least; but not of fewer than
#: the least, since each chunk has a state.
_CHUNK, _LEAST_CHUNK = 64, 16
_MASKED = -math.inf


class Slots(NamedTuple):
    """Where steps of sequences lie in chunks.

    total     number of slots
    first     (sequences + 1,): the first slot of each sequence, and the number of slots
    sequence  (slots,): the number of the sequence that a slot belongs to
    position  (time,): the index of each step when the steps of all slots are laid one after the other
    later     (time // L,): the slots that begin no sequence
    """

    total: int
    first: Tensor
    sequence: Tensor
    position: Tensor
    later: Tensor


def forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    """The output and, if it is asked for, the final state, of ``normalised`` arguments."""
    with in_full(arguments.x):
        return _forward(arguments, options)


def backward(
    arguments: Arguments, options: Options, out_grad: Tensor | None, final_grad: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients that are wanted, of all arguments but ``seq_idx`` and ``cu_seqlens``; differentiable themselves where
    derivatives are recorded."""

    options = options._replace(final=final_grad is not None)

    def recompute(leaves: list[Any], recorded: bool) -> Pairs:
        inputs = Arguments._make([*leaves, *arguments[DIFFERENTIABLE:]])
        return zip(forward(inputs, options), (out_grad, final_grad), strict=True)

    with in_full(arguments.x):
        return gradients(arguments[:DIFFERENTIABLE], wanted, recompute)


def in_full(tensor: Tensor) -> AbstractContextManager[Any]:
    """Without autocast, which would narrow the products."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    x, dt, A, B, C, D, z, bias, initial, seq_idx, cu_seqlens = arguments
    dtype = reference.compute_dtype(x.dtype)
    time, heads, groups = *x.shape[1:3], B.shape[2]
    if cu_seqlens is not None and cu_seqlens.shape[0] == 1:  # no sequence, and therefore no step
        states = x.new_empty(x.shape[0], 0, *x.shape[2:], B.shape[3], dtype=dtype)
        return x.clone(), (
            states if initial is None else initial.to(dtype)
        ) if options.final else None
    steps = options.chunk_size or _chunk_size(cu_seqlens, time)
    steps = min(steps, max(1, time))
    slots = None if cu_seqlens is None else _slots(cu_seqlens, time, steps)
    limit = options.low, options.high
    deltas = reference.step_sizes(dt, bias, options.softplus, limit, dtype)
    # Dimensions from here on: batch, slots, steps of a chunk, groups, heads of a group, then P or N.
    within = groups, heads // groups
    chunk_deltas, tokens, inward, outward = (
        _chunks(t, slots, steps)
        for t in (deltas, deltas.unsqueeze(-1) * x.to(dtype), B.to(dtype), C.to(dtype))
    )
    exponents = (chunk_deltas * A.to(dtype)).unflatten(3, within)
    starts = _starts(seq_idx, slots, steps, cu_seqlens)
    sums = exponents.double().cumsum(2)
    tokens = tokens.unflatten(3, within)
    scores = outward.transpose(2, 3) @ inward.permute(0, 1, 3, 4, 2)  # batch, slots, groups, L, L
    own = (scores.unsqueeze(3) * _decays(sums, starts, dtype)) @ tokens.permute(0, 1, 3, 4, 2, 5)
    to_end = _exponential(sums[:, :, -1:] - sums, starts, lambda n: n != n[:, :, -1:], dtype)
    passed = _exponential(sums[:, :, -1], starts, lambda n: n[:, :, -1] != 0, dtype)
    through, final = _through(
        Chunks(tokens, inward, outward, to_end, passed), initial, slots, options.final
    )
    from_start = _exponential(sums, starts, lambda n: n != 0, dtype)
    y = through * from_start.unsqueeze(-1) + own.permute(0, 1, 4, 2, 3, 5)
    y = _steps(y.flatten(3, 4), slots, time)
    return reference.finished(y, x, D, z).contiguous(), final


# --- Chunks -----------------------------------------------------------------------------------


def _chunk_size(cu_seqlens: Tensor | None, time: int) -> int:
    steps = _CHUNK
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        while steps > _LEAST_CHUNK and steps * sequences >= 2 * time:
            steps //= 2
    return steps


def _slots(cu_seqlens: Tensor, time: int, steps: int) -> Slots:
    sequences = cu_seqlens.shape[0] - 1
    number = torch.arange(sequences + 1, device=cu_seqlens.device)
    count = time // steps + sequences
    # Values are not read where cu_seqlens is on a GPU, and an index out of range would end the process there.
    bounds = functional.pad(cu_seqlens[1:-1].long().clamp(0, time).cummax(0).values, (1, 1))
    bounds = torch.where(number == sequences, time, bounds)
    chunks = torch.div(bounds, steps, rounding_mode="floor")
    first = chunks + number
    first = torch.cat([first[:-1], first.new_full((1,), count)])
    later = torch.arange(time // steps, device=cu_seqlens.device)
    later = later + torch.searchsorted(chunks[1:], later, right=True) + 1
    place = torch.arange(count, device=cu_seqlens.device)
    sequence = torch.searchsorted(first[1:], place, right=True)
    step = torch.arange(time, device=cu_seqlens.device)
    of_step = torch.searchsorted(bounds[1:], step, right=True)
    position = first[of_step] * steps + step - bounds[of_step]
    return Slots(count, first, sequence, position, later)


def _chunks(t: Tensor, slots: Slots | None, steps: int) -> Tensor:
    """(batch, T, …) in chunks, (batch, slots, L, …), with zeros where there is no step."""
    time = t.shape[1]
    if slots is not None:
        empty = t.new_zeros(t.shape[0], slots.total * steps, *t.shape[2:])
        t = empty.index_copy(1, slots.position, t)
    elif rest := -time % steps if time else steps:
        t = functional.pad(t, (0, 0) * (t.dim() - 2) + (0, rest))
    chunks: Tensor = t.unflatten(1, (-1, steps))
    return chunks


def _steps(t: Tensor, slots: Slots | None, time: int) -> Tensor:
    """The inverse of ``_chunks``."""
    t = t.flatten(1, 2)
    if slots is not None:
        return t.index_select(1, slots.position)
    return t.narrow(1, 0, time)


def _starts(
    seq_idx: Tensor | None, slots: Slots | None, steps: int, cu_seqlens: Tensor | None
) -> Tensor | None:
    """How many steps of a chunk, up to each, start from a zero state: (batch, slots, L, 1, 1). The first step of a sequence
    starts from that sequence's initial state."""
    if seq_idx is None:
        return None
    changes = functional.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).int(), (1, 0))
    changes = changes[:, : seq_idx.shape[1]]
    if cu_seqlens is not None:
        step = torch.arange(seq_idx.shape[1], device=seq_idx.device)
        changes = changes.masked_fill(torch.isin(step, cu_seqlens), 0)
    return _chunks(changes, slots, steps).cumsum(2)[..., None, None]


def _exponential(
    exponents: Tensor, starts: Tensor | None, between: Any, dtype: torch.dtype
) -> Tensor:
    """The decay of these exponents; zero where ``between`` finds a start of a sequence on the way."""
    if starts is not None:
        exponents = exponents.masked_fill(between(starts), _MASKED)
    return exponents.to(dtype).exp()


def _decays(sums: Tensor, starts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """From step j to step i of a chunk, (batch, slots, groups, heads of a group, i, j); zero for j after i."""
    lines = sums.permute(0, 1, 3, 4, 2)
    exponents = (lines.unsqueeze(-1) - lines.unsqueeze(-2)).to(dtype)
    steps = sums.shape[2]
    later = torch.ones(steps, steps, dtype=torch.bool, device=sums.device).triu(1)
    if starts is not None:
        number = starts.permute(0, 1, 3, 4, 2)
        later = later | (number.unsqueeze(-1) != number.unsqueeze(-2))
    return exponents.masked_fill(later, _MASKED).exp()


# --- States -----------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """What states before and after chunks are computed from.

    tokens   (batch, slots, L, groups, heads of a group, P)
    inward   B: (batch, slots, L, groups, N)
    outward  C: like ``inward``
    to_end   the decay from each step to the chunk's last: (batch, slots, L, groups, heads of a group)
    passed   the decay over a whole chunk: (batch, slots, groups, heads of a group)
    """

    tokens: Tensor
    inward: Tensor
    outward: Tensor
    to_end: Tensor
    passed: Tensor

    def of(self, slots: Tensor) -> Chunks:
        """Those of some slots alone."""
        return Chunks(*(t.index_select(1, slots) for t in self))

    def additions(self) -> Tensor:
        """What each chunk adds to the state: (batch, slots, heads, P, N)."""
        ends = (self.tokens * self.to_end.unsqueeze(-1)).flatten(4).permute(0, 1, 3, 4, 2)
        states = ends @ self.inward.transpose(2, 3)  # heads of a group and P in one dimension
        additions: Tensor = states.unflatten(3, tuple(self.tokens.shape[4:])).flatten(2, 3)
        return additions

    def gates(self) -> Tensor:
        """What each chunk multiplies the state by: (batch, slots, heads, 1, 1)."""
        return self.passed.flatten(2)[..., None, None]

    def outputs(self, before: Tensor) -> Tensor:
        """Of the states before the chunks, but for the decays from a chunk's start; like ``tokens``."""
        within, size = self.tokens.shape[4:]
        of_group = before.unflatten(2, (-1, within)).flatten(3, 4)
        products = (self.outward.transpose(2, 3) @ of_group.transpose(3, 4)).transpose(2, 3)
        outputs: Tensor = products.unflatten(4, (within, size))
        return outputs


def _through(
    chunks: Chunks, initial: Tensor | None, slots: Slots | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """The outputs of states before chunks, but for the decays from a chunk's start; and the final state, if it is asked for."""
    if slots is not None:
        return _through_packed(chunks, initial, slots, final)
    additions = chunks.additions()
    state = torch.zeros_like(additions[:, 0]) if initial is None else initial
    after = _handed_on(additions, chunks.gates(), state)
    through = chunks.outputs(torch.stack([state, *after[:-1]], 1))
    return through, after[-1] if final else None


def _through_packed(
    chunks: Chunks, initial: Tensor | None, slots: Slots, final: bool
) -> tuple[Tensor, Tensor | None]:
    batch, _, _, groups, within, size = chunks.tokens.shape
    zeros = chunks.tokens.new_zeros(batch, groups * within, size, chunks.inward.shape[4])

    def entering(sequence: Tensor) -> Tensor:
        """The initial states of these sequences."""
        if initial is None:
            return zeros.unsqueeze(1).expand(-1, len(sequence), -1, -1, -1)
        return initial.index_select(1, sequence)

    handing, owner = chunks.of(slots.later - 1), slots.sequence.index_select(0, slots.later)
    begins = slots.later - 1 == slots.first.index_select(0, owner)
    additions = handing.additions()
    states = _handed_on(additions, handing.gates(), zeros, begins, entering(owner))
    before = torch.stack(states, 1) if states else additions
    through = torch.zeros_like(chunks.tokens)
    through = through.index_copy(1, slots.later, chunks.of(slots.later).outputs(before))
    first = slots.first[:-1]
    if initial is not None:
        through = through.index_copy(1, first, chunks.of(first).outputs(initial))
    if not final:
        return through, None
    last = slots.first[1:] - 1
    # Before the last slot of a sequence that has others, the states of the later slots, of which it is the last.
    others = slots.first[1:] - torch.arange(1, len(last) + 1, device=last.device) - 1
    state = entering(torch.arange(len(last), device=last.device))
    # Without later slots there is nothing to choose from.
    if states:
        state = torch.where(
            (last != first)[:, None, None, None], before.index_select(1, others.clamp(min=0)), state
        )
    of_last = chunks.of(last)
    return through, torch.addcmul(of_last.additions(), of_last.gates(), state)


def _handed_on(
    additions: Tensor, gates: Tensor, state: Tensor, begins: Tensor | None = None,
    entering: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """The states after slots: the one before it times a slot's gate, and its addition. ``state`` is before the first one, and
    ``entering`` before those that begin a sequence."""
    after = []
    for k, (addition, gate) in enumerate(zip(additions.unbind(1), gates.unbind(1), strict=True)):
        if begins is not None and entering is not None:
            # Not by a gate of zero, which would hand on what is not finite.
            state = torch.where(begins[k], entering[:, k], state)
        state = torch.addcmul(addition, gate, state)
        after.append(state)
    return after
