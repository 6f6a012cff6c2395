"""Sequences that are packed along time, or cut at resets, as batches of rows for ``rnn``.

A row holds a segment: a packed sequence, or what lies between two resets. Segments run beside one another;
in one row they would run one after the other. Rows of a batch are as long as its longest segment. Segments
whose lengths differ much go in different batches, so that at most half of the steps that are computed are
padding. There are at most as many batches as the longest length has bits.

Steps are numbered through the batch, from 0 to B·T − 1, and sequences from 0 to B·Q − 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from scan_registry.kernels.rnn.op import autograd as rnn_derivatives
from scan_registry.kernels.rnn.op.arguments import Arguments, Options, Resets
from scan_registry.ops.values import are_checked, has_values


class Rows(NamedTuple):
    """A batch of rows.

    steps      (rows, length): the step at each place of each row; beyond a segment's end, its last step
    sequences  (rows,): the sequence that each segment is a part of
    anew       (rows,), bool: whether the row's first step is a reset; None if sequences are not cut at resets
    reset      (rows, length), bool: resets within rows; None if there are none
    """

    steps: Tensor
    sequences: Tensor
    anew: Tensor | None
    reset: Tensor | None


class Layout(NamedTuple):
    """All batches of rows, and where the results are once those of all batches are concatenated.

    places  (B·T,): the place of each step in the results
    last    (B·Q,): the place of each sequence's last step in the results
    empty   (B·Q,), bool: sequences without steps; None if there are none
    """

    batches: tuple[Rows, ...]
    places: Tensor
    last: Tensor
    empty: Tensor | None


def rnn(arguments: Arguments, options: Options, resets: Resets, cut: bool) -> tuple[Tensor, Tensor]:
    """States (states, B, T, N, D) and those after the last step of each sequence (states, B, Q, N, D), for
    ``normalised`` arguments. Differentiable. ``cut``: whether sequences are cut at resets."""
    inputs, recurrent, bias, initial, reset, reset_states = arguments
    batch, time = inputs.shape[:2]
    if not resets.packed:
        initial, reset_states = (
            t if t is None else t.unsqueeze(2) for t in (initial, reset_states)
        )
    layout = layout_of(inputs, reset, resets, cut)
    start = None if initial is None else initial.flatten(1, 2)
    anew = None if reset_states is None else reset_states.flatten(1, 2)
    of_steps = Arguments(inputs.flatten(0, 1), recurrent, bias, start, None, anew)
    states_of_batches = [_states_of(rows, of_steps, options) for rows in layout.batches]
    sequences = resets.cu_seqlens.shape[0] - 1 if resets.packed else 1
    if not states_of_batches:  # there is no step
        one = None if reset_states is None else reset_states[:, :, 0]
        alone = arguments._replace(initial=None, reset_states=one)
        states, zeros = rnn_derivatives.rnn(alone, options)
        if initial is None:
            return states, zeros.unsqueeze(2).repeat(1, 1, sequences, 1, 1)
        return states, initial.clone()
    every = states_of_batches[0] if len(states_of_batches) == 1 else torch.cat(states_of_batches, 1)
    states = every.index_select(1, layout.places).unflatten(1, (batch, time))
    last = every.index_select(1, layout.last)
    if layout.empty is not None:
        last = torch.where(_of_units(layout.empty), 0 if start is None else start, last)
    return states, last.unflatten(1, (batch, sequences))


def _states_of(rows: Rows, arguments: Arguments, options: Options) -> Tensor:
    """The states of one batch of rows, (states, steps, N, D), of arguments whose inputs are steps one after the other, and
    whose states are (states, sequences, N, D)."""
    x = arguments.inputs.index_select(0, rows.steps.flatten()).unflatten(0, rows.steps.shape)
    before, restart = (
        t if t is None else t.index_select(1, rows.sequences)
        for t in (arguments.initial, arguments.reset_states)
    )
    if rows.anew is not None:
        before = _chosen(rows.anew, restart, before)
    restart = None if rows.reset is None else restart
    of_rows = Arguments(x, arguments.recurrent, arguments.bias, before, rows.reset, restart)
    return rnn_derivatives.rnn(of_rows, options)[0].flatten(1, 2)


def first_batch(arguments: Arguments, resets: Resets, cut: bool) -> Tensor:
    """A meta tensor with the shape that the inputs of the first batch of rows have on a GPU. If values cannot be
    read, it has the shape of the sequences as they were given."""
    inputs = arguments.inputs
    reset = arguments.reset if cut else None
    read = [t for t in (reset, resets.cu_seqlens) if t is not None]
    rows = inputs.shape[:2]
    if resets.max_seqlen is not None and reset is None:
        rows = torch.Size((rows[0] * (resets.cu_seqlens.shape[0] - 1), resets.max_seqlen))
    elif all(has_values(t) and not t.is_meta for t in read):
        rows = layout_of(inputs, reset, resets, cut).batches[0].steps.shape
    return inputs.new_empty(*rows, *inputs.shape[2:], device="meta")


def _chosen(which: Tensor, chosen: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Of states (states, rows, N, D), ``given`` in rows where ``which`` is true, else ``other``; None: zeros."""
    if chosen is not None:
        return torch.where(_of_units(which), chosen, 0 if other is None else other)
    return None if other is None else torch.where(_of_units(which), 0, other)


def _of_units(rows: Tensor) -> Tensor:
    """A tensor with a value for each row, shaped to broadcast over heads and units."""
    return rows.unsqueeze(-1).unsqueeze(-1)


def layout_of(inputs: Tensor, reset: Tensor | None, resets: Resets, cut: bool) -> Layout:
    """The layout for inputs (B, T, …), on their device."""
    bounds, longest = resets.cu_seqlens, resets.max_seqlen
    size = inputs.shape[0], inputs.shape[1]
    if longest is not None and are_checked(bounds):
        _check_longest(bounds, longest)
    if longest is not None and not cut and not (bounds.is_cpu and has_values(bounds)):
        return _layout_of_length(inputs, reset, bounds.to(inputs.device).long(), longest)
    layout: Layout = _layout_of_values(size, inputs.device, reset, bounds, cut)
    return layout


def _check_longest(bounds: Tensor, longest: int) -> None:
    steps = int(bounds.diff().max())
    if steps > longest:
        raise ValueError(
            f"max_seqlen is {longest}, and the longest sequence in cu_seqlens has {steps} steps"
        )


# As torch.compiler.disable does, but for its import of the whole compiler.
@_disable_dynamo
def _layout_of_values(
    size: tuple[int, int],
    device: torch.device,
    reset: Tensor | None,
    bounds: Tensor | None,
    cut: bool,
) -> Layout:
    """The layout for the values of ``reset`` and ``bounds``. If they are on a GPU, the CPU waits for them."""
    batch, time = size
    edges = (
        torch.tensor([0, time], device="cpu") if bounds is None else bounds.detach().cpu().long()
    )
    marks = None if reset is None else reset.detach()
    if marks is not None and cut:
        marks = marks.cpu()
    begin, end = edges[:-1], edges[1:]
    has_steps = end > begin
    begins = torch.zeros(batch, time, dtype=torch.bool, device="cpu")
    begins[:, begin[has_steps]] = True
    if cut and marks is not None:
        begins |= marks
    first = begins.flatten().nonzero().flatten()
    lengths = torch.cat([first, first.new_tensor([batch * time])]).diff()
    row, column = first // max(time, 1), first % max(time, 1)
    sequences = row * len(begin) + torch.bucketize(column, edges, right=True) - 1
    anew = marks.flatten()[first] if cut and marks is not None else None

    batches, offset = [], 0
    base = torch.empty_like(first)
    for chosen in _buckets(lengths):
        own, length = lengths[chosen].unsqueeze(1), int(lengths[chosen].max())
        within = torch.arange(length, device="cpu").minimum(own - 1)
        steps = first[chosen].unsqueeze(1) + within
        base[chosen] = offset + torch.arange(len(chosen), device="cpu") * length
        offset += steps.numel()
        inside = None
        if marks is not None and not cut:
            beyond = torch.arange(length, device="cpu") >= own
            inside = marks.flatten()[steps.to(device)] & ~beyond.to(device)
        begin_anew = None if anew is None else anew[chosen].to(device)
        batches.append(Rows(steps.to(device), sequences[chosen].to(device), begin_anew, inside))
    places = (base - first).repeat_interleave(lengths)
    places += torch.arange(batch * time, device="cpu")
    last = torch.zeros(batch, len(begin), dtype=torch.int64, device="cpu")
    if time:
        at = torch.arange(batch, device="cpu").unsqueeze(1) * time + (end - 1).clamp_min(0)
        last = places[at]
    empty = None if bool(has_steps.all()) else (~has_steps).repeat(batch).to(device)
    return Layout(tuple(batches), places.to(device), last.flatten().to(device), empty)


def _buckets(lengths: Tensor) -> list[Tensor]:
    """Numbers of segments, in batches of similar lengths. The longest segment of a batch is less than twice as
    long as the shortest. If at most half of one batch of all segments would be padding, there is one batch."""
    if not len(lengths):
        return []
    everything = torch.arange(len(lengths), device="cpu")
    if int(lengths.max()) * len(lengths) <= 2 * int(lengths.sum()):
        return [everything]
    bits = lengths.double().log2().floor()
    return [everything[bits == bit] for bit in bits.unique().flip(0)]


def _layout_of_length(inputs: Tensor, reset: Tensor | None, bounds: Tensor, longest: int) -> Layout:
    """One batch of rows of a known length, computed on the device of ``bounds``: the CPU waits for no values."""
    (batch, time), device = inputs.shape[:2], inputs.device
    longest = max(longest, 1)
    begin, length = bounds[:-1], bounds.diff()
    sequences = begin.shape[0]
    lead = torch.arange(batch, device=device)
    along = torch.arange(longest, device=device)
    within = along.minimum((length - 1).clamp_min(0).unsqueeze(1))
    steps = (begin.unsqueeze(1) + within).clamp(0, max(time - 1, 0))
    steps = (lead.view(-1, 1, 1) * time + steps).flatten(0, 1)
    inside = None
    if reset is not None:
        inside = reset.reshape(-1)[steps] & (along < length.unsqueeze(1)).repeat(batch, 1)
    times = torch.arange(time, device=device)
    own = (torch.bucketize(times, bounds, right=True) - 1).clamp(0, sequences - 1)
    places = own * longest + (times - begin[own]).clamp(0, longest - 1)
    last = torch.arange(sequences, device=device) * longest + (length - 1).clamp(0, longest - 1)
    row = lead.unsqueeze(1) * (sequences * longest)
    all_of_them = torch.arange(batch * sequences, device=device)
    batches = (Rows(steps, all_of_them, None, inside),) if time else ()
    return Layout(
        batches, (row + places).flatten(), (row + last).flatten(), (length == 0).repeat(batch)
    )
