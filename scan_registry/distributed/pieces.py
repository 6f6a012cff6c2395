"""Pieces: the ranges of channels in which "pass" scans."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from scan_registry.distributed.rows import cut


@dataclass(frozen=True)
class Piece:
    """A range of channels; all channels if ``axis`` is None."""

    axis: int | None
    axis_of_states: int
    begin: int
    count: int

    def sequence(self, x: Tensor) -> Tensor:
        """This piece of a tensor that has the dimensions of the sequence, or broadcasts to them."""
        return x if self.axis is None else cut(x, self.axis, self.begin, self.count)

    def state(self, x: Tensor | None) -> Tensor | None:
        """This piece of the states of all sequences."""
        if x is None or self.axis is None:
            return x
        return x.narrow(self.axis_of_states, self.begin, self.count)
