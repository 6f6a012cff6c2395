"""What is timed: one scan, its inputs, and the bytes that it has to move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PASSES = ("forward", "backward")
LAYOUTS = ("time_last", "channel_last")
DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64")
GATES = ("full", "channel")
_SEED = 1  # of the sequences' lengths, which are the same in every run


@dataclass(frozen=True)
class Case:
    """One scan to time: (batch, channels, time), whatever the layout in memory.

    sequences  how many of random length are packed along time; 0: none are
    gates      one for every element ("full"), or one for each channel ("channel")
    """

    layout: str
    batch: int
    channels: int
    time: int
    dtype: str
    sequences: int = 0
    gates: str = "full"

    @classmethod
    def parse(cls, text: str) -> Case:
        """``time_last:8,1536,4096:bfloat16``, to which ``:sequences=64`` and ``:gates=channel`` may be
        added; ``ValueError`` for anything else."""
        try:
            layout, shape, dtype, *options = text.split(":")
            batch, channels, time = map(int, shape.split(","))
            given = dict(option.split("=") for option in options)
            sequences, gates = int(given.pop("sequences", 0)), given.pop("gates", GATES[0])
            if given:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"the case is {text!r}; expected layout:batch,channels,time:dtype, and perhaps "
                ":sequences=N and :gates=channel"
            ) from None
        if (
            layout not in LAYOUTS
            or dtype not in DTYPES
            or gates not in GATES
            or min(batch, channels, time) < 1
            or sequences < 0
        ):
            raise ValueError(
                f"the case is {text!r}; layouts are {', '.join(LAYOUTS)}, dtypes "
                f"{', '.join(DTYPES)}, gates {', '.join(GATES)}, and sizes positive"
            )
        return cls(layout, batch, channels, time, dtype, sequences, gates)

    def __str__(self) -> str:
        """What ``parse`` takes."""
        options = f":sequences={self.sequences}" if self.sequences else ""
        options += f":gates={self.gates}" if self.gates != GATES[0] else ""
        shape = f"{self.batch},{self.channels},{self.time}"
        return f"{self.layout}:{shape}:{self.dtype}{options}"

    @property
    def options(self) -> str:
        """In words, what is not as usual; empty if nothing is."""
        packed = [f"{self.sequences} packed sequences"] if self.sequences else []
        shared = ["a gate per channel"] if self.gates == "channel" else []
        return ", ".join([*packed, *shared])

    def to_json(self) -> dict[str, Any]:
        """The fields; those of options only where there are any."""
        usual = {"sequences": 0, "gates": GATES[0]}
        return {k: v for k, v in vars(self).items() if usual.get(k) != v}

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

    def random_gates(self, device: torch.device | str) -> Tensor:
        """New random gates of the dtype, of |gate| ≤ 1."""
        values = self.sequence(device)
        if self.gates == "channel":
            values = values.select(self.dim, 0)[0].clone()
            values = values if self.dim != -1 else values[:, None]
        return values / (1 + values.abs()) if values.is_complex() else values.sigmoid_()

    def bounds(self, device: torch.device | str) -> Tensor | None:
        """Where the packed sequences begin and end; None where none are packed."""
        if not self.sequences:
            return None
        generator = torch.Generator().manual_seed(_SEED)
        cuts = torch.randint(0, self.time + 1, (self.sequences - 1,), generator=generator)
        ends = torch.tensor([0, self.time])
        return torch.cat([ends[:1], cuts.sort().values, ends[1:]]).to(device)

    def tensor_bytes(self) -> int:
        """Of each tensor."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.batch * self.channels * self.time * itemsize

    def moves(self, direction: str) -> tuple[int, int]:
        """How many tensors must be read and written: gates, tokens and the states; backward gates,
        states and the incoming gradient, and two gradients. A gate per channel is next to nothing."""
        reads, writes = (2, 1) if direction == "forward" else (3, 2)
        if self.gates == "channel":
            return reads - 1, max(1, writes - 1)
        return reads, writes

    def traffic(self, direction: str) -> int:
        """Bytes that must move."""
        return self.tensor_bytes() * sum(self.moves(direction))
