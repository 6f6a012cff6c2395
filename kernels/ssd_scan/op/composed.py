"""``ssd_scan`` in its chunked form, composed of torch's matrix products.

This runs what no kernel takes: float32 and float64, the CPU, derivatives of derivatives, forward mode and ``torch.func``. A chunk
of a sequence is some products of matrices: C·Bᵀ with the decay from step to step, times δ·x; C times the state before the chunk;
and the chunk's own part of the state after it. A loop over the chunks hands the states on. Decays are exponents of differences of
cumulative sums, taken in float64, since a difference may be far smaller than the sums.

Of packed sequences, each begins a chunk. Chunk k of sequence s is slot ``cu_seqlens[s] // L + s + k`` of ``T // L + sequences``, for
chunks of L steps, as in the kernels. So shapes do not depend on the values of ``cu_seqlens``, which only the device reads. Steps of
a slot that no sequence fills have δ = 0 and x = 0: they leave the state as it is.
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

#: Steps of a chunk, if the caller does not say: a CPU is fastest with few, as decays are a matrix of so many squared.
_CHUNK = 64
_MASKED = -math.inf


class Slots(NamedTuple):
    """Where steps of sequences lie in chunks.

    total     number of slots
    first     (sequences + 1,): the first slot of each sequence, and the number of slots
    sequence  (slots,): the number of the sequence that a slot belongs to
    position  (time,): the index of each step when the steps of all slots are laid one after the other

    The tensors are None if nothing is packed.
    """

    total: int
    first: Tensor | None = None
    sequence: Tensor | None = None
    position: Tensor | None = None


def forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """The output and the final state, of ``normalised`` arguments."""
    with in_full(arguments.x):
        return _forward(arguments, options)


def backward(
    arguments: Arguments,
    options: Options,
    out_grad: Tensor | None,
    final_grad: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, of all arguments but ``seq_idx`` and ``cu_seqlens``; differentiable themselves where
    derivatives are recorded."""

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


def _forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D, z, bias, initial, seq_idx, cu_seqlens = arguments
    dtype = reference.compute_dtype(x.dtype)
    batch, time, heads, size = x.shape
    groups, states = B.shape[2:]
    steps = min(options.chunk_size or _CHUNK, max(1, time))
    slots = _slots(cu_seqlens, time, steps)
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
    ends = (tokens * to_end.unsqueeze(-1)).flatten(4).permute(0, 1, 3, 4, 2)
    additions = (ends @ inward.transpose(2, 3)).view(batch, slots.total, heads, size, states)
    passed = _exponential(sums[:, :, -1], starts, lambda n: n[:, :, -1] != 0, dtype).flatten(2)
    before, final = _handed_on(additions, passed, initial, slots)
    of_group = before.view(batch, slots.total, groups, within[1] * size, states)
    through = (outward.transpose(2, 3) @ of_group.transpose(3, 4)).transpose(2, 3)
    from_start = _exponential(sums, starts, lambda n: n != 0, dtype)
    y = through.unflatten(4, (within[1], size)) * from_start.unsqueeze(-1)
    y = _steps((y + own.permute(0, 1, 4, 2, 3, 5)).flatten(3, 4), slots, time)
    return reference.finished(y, x, D, z).contiguous(), final


# --- Chunks -----------------------------------------------------------------------------------


def _slots(cu_seqlens: Tensor | None, time: int, steps: int) -> Slots:
    if cu_seqlens is None:
        return Slots(max(1, -(-time // steps)))
    sequences = cu_seqlens.shape[0] - 1
    number = torch.arange(sequences + 1, device=cu_seqlens.device)
    count = time // steps + sequences
    bounds = cu_seqlens.long()
    first = torch.div(bounds, steps, rounding_mode="floor") + number
    first = torch.cat([first[:-1], first.new_full((1,), count)])
    place = torch.arange(count, device=cu_seqlens.device)
    sequence = torch.searchsorted(first[1:], place, right=True)
    step = torch.arange(time, device=cu_seqlens.device)
    of_step = torch.searchsorted(bounds[1:], step, right=True)
    position = first[of_step] * steps + step - bounds[of_step]
    return Slots(count, first, sequence, position)


def _chunks(t: Tensor, slots: Slots, steps: int) -> Tensor:
    """(batch, T, …) in chunks, (batch, slots, L, …), with zeros where there is no step."""
    every = slots.total * steps
    if slots.position is not None:
        empty = t.new_zeros(t.shape[0], every, *t.shape[2:])
        t = empty.index_copy(1, slots.position, t)
    elif t.shape[1] < every:
        t = functional.pad(t, (0, 0) * (t.dim() - 2) + (0, every - t.shape[1]))
    chunks: Tensor = t.unflatten(1, (slots.total, steps))
    return chunks


def _steps(t: Tensor, slots: Slots, time: int) -> Tensor:
    """The inverse of ``_chunks``."""
    t = t.flatten(1, 2)
    if slots.position is not None:
        return t.index_select(1, slots.position)
    return t.narrow(1, 0, time)


def _starts(
    seq_idx: Tensor | None, slots: Slots, steps: int, cu_seqlens: Tensor | None
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


def _handed_on(
    additions: Tensor, passed: Tensor, initial: Tensor | None, slots: Slots
) -> tuple[Tensor, Tensor]:
    """The states before all slots, (batch, slots, H, P, N), and the final ones. A slot passes on the state before it times
    ``passed``, and adds its own."""
    entering, begins = None, None
    if slots.first is not None and slots.sequence is not None:
        place = torch.arange(slots.total, device=additions.device)
        begins = (place == slots.first[slots.sequence])[:, None, None, None].unbind()
        if initial is not None:
            entering = initial.index_select(1, slots.sequence).unbind(1)
    zeros = torch.zeros_like(additions[:, 0])
    state = zeros if initial is None or begins is not None else initial
    before = []
    after = []
    pairs = zip(additions.unbind(1), passed[..., None, None].unbind(1), strict=True)
    for k, (addition, gate) in enumerate(pairs):
        if begins is not None:
            # Not by a gate of zero, which would hand on what is not finite.
            state = torch.where(begins[k], zeros if entering is None else entering[k], state)
        before.append(state)
        state = torch.addcmul(addition, gate, state)
        after.append(state)
    if slots.first is None:
        return torch.stack(before, 1), state
    return torch.stack(before, 1), torch.stack(after, 1).index_select(1, slots.first[1:] - 1)
