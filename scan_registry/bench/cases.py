"""What is timed: one scan, its inputs, and the bytes that it has to move."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PASSES = ("forward", "backward")
LAYOUTS = ("time_last", "channel_last")
DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64")


@dataclass(frozen=True)
class Case:
    """One scan to time: (batch, channels, time), whatever the layout in memory."""

    layout: str
    batch: int
    channels: int
    time: int
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Case:
        """``time_last:8,1536,4096:bfloat16``; ``ValueError`` for anything else."""
        try:
            layout, shape, dtype = text.split(":")
            batch, channels, time = map(int, shape.split(","))
        except ValueError:
            raise ValueError(
                f"the case is {text!r}; expected layout:batch,channels,time:dtype"
            ) from None
        if layout not in LAYOUTS or dtype not in DTYPES or min(batch, channels, time) < 1:
            raise ValueError(
                f"the case is {text!r}; layouts are {', '.join(LAYOUTS)}, dtypes "
                f"{', '.join(DTYPES)}, and sizes positive"
            )
        return cls(layout, batch, channels, time, dtype)

    @property
    def dim(self) -> int:
        """The time dimension, counted from the last."""
        return -1 if self.layout == "time_last" else -2

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of each tensor."""
        if self.layout == "time_last":
            return self.batch, self.channels, self.time
        return self.batch, self.time, self.channels

    def sequence(self, device: torch.device | str) -> Tensor:
        """A new random tensor of the shape and dtype."""
        return torch.randn(self.shape, device=device, dtype=getattr(torch, self.dtype))

    def gates(self, device: torch.device | str) -> Tensor:
        """A new random tensor of the same kind, within the unit disc."""
        values = self.sequence(device)
        return values / (1 + values.abs()) if values.is_complex() else values.sigmoid_()

    def tensor_bytes(self) -> int:
        """Of each tensor."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.batch * self.channels * self.time * itemsize

    def traffic(self, direction: str) -> int:
        """Bytes that must move: two reads and a write, or three reads and two writes."""
        return self.tensor_bytes() * (3 if direction == "forward" else 5)
