"""selective_state_update in plain torch: what the kernels are tested and attested against, and runs when none fits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def compute_dtype(state: torch.dtype) -> torch.dtype:
    """What a step is computed in."""
    return torch.float64 if state == torch.float64 else torch.float32


def step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    indices: Tensor | None = None, dst_state: Tensor | None = None,
    dst_indices: Tensor | None = None, cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None, seed: Tensor | None = None, pad_slot: int = -1,
) -> Tensor:  # fmt: skip
    """The steps of all sequences, in place of ``state``; the output, in the dtype of ``x``.

    δ      = dt + dt_bias, or softplus of that, which is the identity above 20
    state' = exp(δ·A)·state + δ·B·x
    y      = Σ_n C[n]·state'[n] + D·x
    out    = y, or y·silu(z)

    In float32, or in float64 where the state is that. Without heads the state is (slots, channels, N), with heads
    (slots, heads, channels, N); ``x``, ``dt`` and ``z`` are the same with the batch in place of slots, and without N;
    ``A``, ``D`` and ``dt_bias`` have no batch either. ``B`` and ``C`` are (batch, N) or (batch, groups, N): each group
    belongs to as many neighbouring heads, or without heads channels, as every other. Row ``indices[b]`` of the state is that
    of batch b, else row b; where there is no such row, the output is zero. ``function.selective_state_update`` says what
    the arguments after ``indices`` mean.
    """
    if not x.numel():
        return torch.empty_like(x)
    steps = _Steps(state.dtype, A, D, dt_bias, dt_softplus)
    if indices is cu_seqlens is dst_state is dst_indices is seed is None:
        new, y = steps(state, x, dt, B, C, z)
        state.copy_(new)
        return y.to(x.dtype)
    starts, lengths = _tokens_of(x, cu_seqlens)
    batch = lengths.shape[0]
    source = _first_slots(indices, num_accepted, batch, state.device)
    target = state if dst_state is None else dst_state
    destinations = indices if dst_indices is None else dst_indices
    if destinations is None:
        destinations = source
    active = _are_slots(source, state.shape[0], pad_slot)
    current = state.new_zeros((batch, *state.shape[1:]), dtype=steps.compute)
    current[active] = state[source[active]].to(steps.compute)
    out = torch.zeros_like(x)
    for t in range(1 if cu_seqlens is None else int(lengths.max())):
        live = (active & torch.gt(lengths, t)).nonzero().squeeze(1)
        at = starts[live] + t
        new, y = steps(current[live], x[at], dt[at], B[at], C[at], None if z is None else z[at])
        current[live] = new
        out[at] = y.to(x.dtype)
        to = _slots_after(destinations[live], t, lengths[live])
        written = _are_slots(to, target.shape[0], pad_slot)
        to, new = to[written].long(), new[written]
        if seed is not None:
            new = stochastically_rounded(new, target.dtype, seed, to)
        target.index_copy_(0, to, new.to(target.dtype))
    return out


def _tokens_of(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The first token of each sequence, and how many it has."""
    if cu_seqlens is None:
        starts = torch.arange(x.shape[0], device=x.device)
        return starts, torch.ones_like(starts)
    bounds = cu_seqlens.long().clamp(0, x.shape[0])
    return bounds[:-1], (bounds[1:] - bounds[:-1]).clamp_min(0)


def _slots_after(destinations: Tensor, t: int, lengths: Tensor) -> Tensor:
    """The slots of the states after token t of sequences that have it; -1 where they are not written."""
    nowhere = torch.full_like(lengths, -1)
    if destinations.dim() == 1:
        return torch.where(lengths == t + 1, destinations, nowhere)
    return destinations[:, t] if t < destinations.shape[1] else nowhere


class _Steps:
    """One step of some sequences: the new states and the output, in the dtype that is computed in."""

    def __init__(
        self,
        dtype: torch.dtype,
        A: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        dt_softplus: bool,
    ) -> None:
        self.compute = compute = compute_dtype(dtype)
        self.A, self.softplus = A.to(compute), dt_softplus
        self.D = None if D is None else D.to(compute)
        self.bias = None if dt_bias is None else dt_bias.to(compute)

    def __call__(
        self, state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        compute = self.compute
        wide, sizes = x.to(compute), dt.to(compute)
        if self.bias is not None:
            sizes = sizes + self.bias
        if self.softplus:
            sizes = functional.softplus(sizes, threshold=20.0)
        inward, outward = (_per_head(projection.to(compute), state) for projection in (B, C))
        gates = torch.exp(sizes.unsqueeze(-1) * self.A)
        new = gates * state.to(compute) + (sizes * wide).unsqueeze(-1) * inward
        y = (new * outward).sum(-1)
        if self.D is not None:
            y = y + self.D * wide
        return new, y if z is None else y * functional.silu(z.to(compute))


def _first_slots(
    indices: Tensor | None, num_accepted: Tensor | None, batch: int, device: torch.device
) -> Tensor:
    """The slot that each sequence starts from."""
    if indices is None:
        return torch.arange(batch, device=device)
    if indices.dim() == 1:
        return indices.long()
    columns = torch.zeros(batch, dtype=torch.int64, device=device)
    if num_accepted is not None:
        columns = (num_accepted.long() - 1).clamp(0, indices.shape[1] - 1)
    return indices.gather(1, columns.unsqueeze(1)).squeeze(1).long()


def _are_slots(slots: Tensor, count: int, pad_slot: int) -> Tensor:
    return (slots >= 0) & (slots < count) & (slots != pad_slot)


def _per_head(projection: Tensor, state: Tensor) -> Tensor:
    """``B`` or ``C`` with the dimensions of the state."""
    if projection.dim() == 2:
        projection = projection.unsqueeze(1)
    spread = projection.repeat_interleave(state.shape[1] // max(1, projection.shape[1]), 1)
    return spread.unsqueeze(2) if state.dim() == 4 else spread


# --- Stochastic rounding, as in rounding.cuh --------------------------------------------------

_WORD = 0xFFFFFFFF


def _scrambled(word: Tensor) -> Tensor:
    """A permutation of words of 32 bits, which are in int64."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def random_bits(seed: Tensor, slots: Tensor, rows: int, states: int) -> Tensor:
    """16 random bits for each state, (slots, rows, states); they depend on the seed, the slot, the row and the state alone."""
    seed = seed.reshape(()).long()
    row = torch.arange(rows, device=slots.device).unsqueeze(1)
    number = torch.arange(states, device=slots.device)
    of_seed = _scrambled(_scrambled(seed & _WORD) ^ ((seed >> 32) & _WORD))
    key = _scrambled(_scrambled(of_seed ^ (slots.long() & _WORD)).view(-1, 1, 1) ^ row)
    word = _scrambled((key + (number // 2) * 0x9E3779B9) & _WORD)
    return (word >> (16 * (number % 2))) & 0xFFFF


def stochastically_rounded(new: Tensor, dtype: torch.dtype, seed: Tensor, slots: Tensor) -> Tensor:
    """New states of slots, in float32, each rounded to a neighbour in ``dtype``, of 16 bits."""
    # Not by -1, which no slots at all would leave open.
    flat = new.float().flatten(1, -2).contiguous()
    bits = random_bits(seed, slots, *flat.shape[1:]).to(torch.int32)
    if dtype == torch.bfloat16:
        raised, mask = torch.zeros_like(flat), -0x10000
    else:
        # Numbers below the smallest normal one lie as close as that one and its neighbours.
        smallest = torch.full_like(flat, 2.0**-14).copysign(flat)
        raised = torch.where(flat.abs() < 2.0**-14, smallest, torch.zeros_like(flat))
        bits, mask = bits >> 3, -0x2000
    rounded = (((flat + raised).view(torch.int32) + bits) & mask).view(torch.float32) - raised
    return torch.where(flat.isnan(), flat, rounded).view_as(new)
