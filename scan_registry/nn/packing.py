"""A ``PackedSequence`` as sequences one after the other, and the steps at which states start anew.

The data of a ``PackedSequence`` have the first steps of all sequences first, then the second steps, and so on,
and the longest sequence comes first. ``batch_sizes`` is on the CPU, so nothing here waits for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Packing(NamedTuple):
    """The orders of steps of a ``PackedSequence``. "In a row" means one sequence after the other, in the order
    in which the data have the sequences. All tensors but ``bounds`` are on the device of the data.

    cu_seqlens  (sequences + 1,), on the CPU: where sequences begin in a row, and where the last one ends
    order       (steps,): for each step in a row, its place in the data
    back        (steps,): for each step of the data, its place in a row
    turned      (steps,): places in a row, with the steps of each sequence reversed
    ends        (steps,), bool: True at the last step of each sequence in a row
    """

    cu_seqlens: Tensor
    order: Tensor
    back: Tensor
    turned: Tensor
    ends: Tensor

    @classmethod
    def of(cls, packed: PackedSequence) -> Packing:
        """The packing of a ``PackedSequence``."""
        sizes, device = packed.batch_sizes, packed.data.device
        sequences = torch.arange(int(sizes[0]), device=sizes.device)
        lengths = (sizes.unsqueeze(1) > sequences).sum(0)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        begin, sequence = (t.repeat_interleave(lengths) for t in (cu_seqlens[:-1], sequences))
        steps = torch.arange(int(cu_seqlens[-1]), device=sizes.device)
        within = steps - begin
        order = (sizes.cumsum(0) - sizes)[within] + sequence
        turned = begin + lengths[sequence] - 1 - within
        ends = within == lengths[sequence] - 1
        return cls(cu_seqlens, *(t.to(device) for t in (order, order.argsort(), turned, ends)))


class Resets(NamedTuple):
    """Where the states of a module start anew.

    marks   (B, T), bool: the steps at which a network that goes forwards starts anew
    turned  (B, T), bool: those of a network that goes backwards, with the last step first; None if none does
    states  the states that a reset starts from, shaped as the module's states; None for zeros
    """

    marks: Tensor
    turned: Tensor | None
    states: list[Tensor] | None


def turned_resets(marks: Tensor, packing: Packing | None) -> Tensor:
    """The marks for a network that goes backwards, of ``marks`` (B, T), which are at the first steps of
    episodes.

    Backwards, an episode begins at its last step, which is the step before the first step of the next episode.
    """
    time = marks.shape[1]
    ends = torch.arange(time, device=marks.device) == time - 1 if packing is None else packing.ends
    begins = marks.roll(-1, 1) & ~ends
    return begins.flip(1) if packing is None else begins.index_select(1, packing.turned)
