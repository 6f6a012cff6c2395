"""A linear scan as numbers: what selection and launching need to know, and no tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from scan_registry.kernels.model import ITEM_SIZE

Direction = Literal["forward", "backward"]
Layout = Literal["time_last", "channel_last"]

#: The tensors that have strides of their own, per direction, in the kernels' order. ``grads`` are
#: ``gates_grad`` and ``tokens_grad``, which share one layout.
STRIDED = {
    "forward": ("gates", "tokens", "states"),
    "backward": ("gates", "states", "states_grad", "grads"),
}


@dataclass(frozen=True)
class Strides:
    """Distance between neighbours along each dimension, in elements."""

    batch: int
    channel: int
    time: int


def common_alignment(addresses: Iterable[int]) -> int:
    """Bytes, at most 16, that divide every address."""
    together = 16
    for address in addresses:
        together |= address
    return together & -together


@dataclass(frozen=True)
class LinearScanProblem:
    """One direction of one scan over (batch, channels, time).

    layout     which dimension has unit stride in every tensor
    strides    of the tensors that ``STRIDED`` names, in that order
    alignment  bytes, at most 16, that divide the address of every sequence and of initial_state
    """

    direction: Direction
    layout: Layout
    dtype: str
    batch: int
    channels: int
    time: int
    strides: tuple[Strides, ...]
    alignment: int

    @property
    def kernel(self) -> str:
        return f"{self.layout}_{self.direction}"

    def scalars(self) -> dict[str, int]:
        """Every integer parameter of the kernels, by name."""
        values = {"batch": self.batch, "channels": self.channels, "time": self.time, "flags": 0}
        for name, strides in zip(STRIDED[self.direction], self.strides, strict=True):
            values[f"{name}_batch"] = strides.batch
            values[f"{name}_channel"] = strides.channel
            values[f"{name}_time"] = strides.time
        return values

    def whole_chunks(self, elements: int) -> bool:
        """Whether every row starts at, and consists of, whole chunks of ``elements``."""
        if self.alignment < 16:
            return False
        row = self.time if self.layout == "time_last" else self.channels
        jumps = (
            ((self.batch, s.batch), (self.channels, s.channel))
            if self.layout == "time_last"
            else ((self.batch, s.batch), (self.time, s.time))
            for s in self.strides
        )
        return row % elements == 0 and all(
            size == 1 or stride % elements == 0 for pairs in jumps for size, stride in pairs
        )

    def chunk(self) -> int:
        """Elements in 16 bytes."""
        return 16 // ITEM_SIZE[self.dtype]
