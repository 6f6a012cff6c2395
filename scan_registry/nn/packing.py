"""How the steps of a ``PackedSequence`` come to lie one sequence after the other, and where states start anew.

In its data, the first steps of all sequences come first, then the second ones, and so on; the longest
sequences lead. Its sizes are on the CPU, so nothing here waits for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Packing(NamedTuple):
    """Of a ``PackedSequence``, with sequences in the order of its data. All but ``bounds`` are on its device.

    bounds   (sequences + 1,): where sequences begin, on the CPU
    order    (steps,): of each step, sequence after sequence, its place in the data
    back     (steps,): of each step of the data its place, sequence after sequence
    turned   (steps,): the steps, sequence after sequence, each from its end
    ends     (steps,), bool: the last step of each sequence
    """

    bounds: Tensor
    order: Tensor
    back: Tensor
    turned: Tensor
    ends: Tensor

    @classmethod
    def of(cls, packed: PackedSequence) -> Packing:
        """The packing of a ``PackedSequence``."""
        sizes, device = packed.batch_sizes, packed.data.device
        sequences = torch.arange(int(sizes[0]))
        lengths = (sizes.unsqueeze(1) > sequences).sum(0)
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        begin, sequence = (t.repeat_interleave(lengths) for t in (bounds[:-1], sequences))
        steps = torch.arange(int(bounds[-1]))
        within = steps - begin
        order = (sizes.cumsum(0) - sizes)[within] + sequence
        turned = begin + lengths[sequence] - 1 - within
        ends = within == lengths[sequence] - 1
        made = order, order.argsort(), turned, ends
        return cls(bounds, *(t.to(device) for t in made))


class Resets(NamedTuple):
    """Where the states of a module start anew.

    marks   (B, T), bool: before which steps
    turned  (B, T), bool: the same for a network that goes backwards, with the last step first
    states  what they are then, like the module's states; None for zeros
    """

    marks: Tensor
    turned: Tensor
    states: list[Tensor] | None


def turned_resets(marks: Tensor, packing: Packing | None) -> Tensor:
    """Of marks (B, T) those for a network that goes backwards.

    A mark is at the first step of an episode. Backwards an episode begins at its last step, before which,
    in time, comes the first step of the next one.
    """
    time = marks.shape[1]
    ends = torch.arange(time, device=marks.device) == time - 1 if packing is None else packing.ends
    begins = marks.roll(-1, 1) & ~ends
    return begins.flip(1) if packing is None else begins.index_select(1, packing.turned)
