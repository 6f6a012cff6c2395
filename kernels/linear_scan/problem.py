"""A linear scan as numbers: what selection and launching need to know, and no tensor."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.model import ITEM_SIZE

Direction = Literal["forward", "backward", "reduction", "summary"]
Layout = Literal["time_last", "channel_last"]

#: The tensors that have strides of their own, per direction, in the kernels' order. ``grads`` are
#: ``gates_grad`` and ``tokens_grad``, which share one layout; ``state`` are the states before and
#: after the scan and their gradients, which share one too.
STRIDED: dict[Direction, tuple[str, ...]] = {
    "forward": ("gates", "tokens", "states", "state"),
    "backward": ("gates", "states", "states_grad", "grads", "state"),
    "reduction": ("tokens_grad", "states", "gates_grad", "state"),
    "summary": ("gates", "tokens", "state"),
}

#: Blocks of a grid along y or z: CUDA's limit.
MOST_ALONG_Y = 65_535
#: Elements along the contiguous and along the other dimension that one block of a reduction sums.
REDUCTION_TILE = (32, 64)
#: Blocks of a reduction worth having; batches are summed apart until there are as many.
REDUCTION_BLOCKS = 1024


#: Of contiguous channels: time steps of the smallest tile that sums the gradient of gates over them.
SUM_STEPS = 64

#: Why a variant that reads rows of gates does not solve a problem.
ONE_GATE = "a row has one gate for all times"


@dataclass(frozen=True)
class Strides:
    """Distance between neighbours along each dimension, in elements. Along the time of ``state``,
    neighbours are the states of successive sequences."""

    outer: int
    batch: int
    channel: int
    time: int


DIMENSIONS = ("outer", "batch", "channel", "time")


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def state_dtype(dtype: str) -> str:
    """The dtype that the recurrence is computed in."""
    return dtype if ITEM_SIZE[dtype] == 8 else "float32"


@dataclass(frozen=True)
class Reduction:
    """How a sum over the dimensions along which gates are broadcast is cut into pieces.

    groups  runs of summed (outer, batch) pairs, each of which gives pieces of its own
    kept    (outer, batch) pairs that are not summed
    tiles   how many along channels and along time
    pieces  partial sums for each gate, to be added up in the end
    """

    groups: int
    kept: int
    tiles: tuple[int, int]
    pieces: int


@dataclass(frozen=True)
class LinearScanProblem:
    """One direction of one scan over (outer, batch, channels, time).

    layout       which dimension has unit stride: time, or channels
    dtype        of states, and of tokens and all gradients but that of gates
    gates_dtype  of gates and their gradient
    sequences    how many are packed along time, with their ends in ``offsets``; 0 if not packed
    reverse      whether x[t] follows from x[t+1]
    strides      of the tensors that ``STRIDED`` names, in that order; 0 where gates are broadcast
    alignment    bytes, at most 16, that divide the address of every (batch, channels, time) tensor
    sums         of a backward problem: whether gates_grad is up to ``sum_pieces`` sums over time for each state, each lying as
                 states do
    has_states   whether there are states before or after packed sequences, or gradients of such
    """

    direction: Direction
    layout: Layout
    dtype: str
    gates_dtype: str
    outer: int
    batch: int
    channels: int
    time: int
    strides: tuple[Strides, ...]
    alignment: int
    sequences: int = 0
    reverse: bool = False
    sums: bool = False
    has_states: bool = False

    @property
    def kernel(self) -> str:
        return f"{self.layout}_{self.direction}"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of the four dimensions."""
        return self.outer, self.batch, self.channels, self.time

    def scalars(self, launch: int = 0) -> dict[str, int]:
        """Every integer parameter of the kernels, by name. ``launch`` is what the launch says in the bits of ``flags`` from 2 on, such
        as the time steps of a warp or the shape of a tile: see the kernel."""
        return {**self._scalars, "flags": self._scalars["flags"] + 4 * launch}

    @cached_property
    def _scalars(self) -> dict[str, int]:
        values = {
            "outer": self.outer,
            "batch": self.batch,
            "channels": self.channels,
            "time": self.time,
            "sequences": self.sequences,
            "flags": int(self.reverse) + 2 * int(self.sums),
        }
        for name, strides in zip(STRIDED[self.direction], self.strides, strict=True):
            for dimension, stride in zip(DIMENSIONS, vars(strides).values(), strict=True):
                values[f"{name}_{dimension}"] = stride
        if self.direction == "reduction":
            values["groups"] = self.reduction().groups
        return values

    def strides_of(self, tensor: str) -> Strides:
        """The strides of one of the tensors that ``STRIDED`` names."""
        return self.strides[STRIDED[self.direction].index(tensor)]

    def has_one_gate(self) -> bool:
        """Whether each channel has one gate for all times."""
        return self.time > 1 and self.strides_of("gates").time == 0

    def sequence_strides(self) -> tuple[Strides, ...]:
        """Those of the tensors that have a time: all but ``state``."""
        return self.strides[:-1]

    def one_gate_a_row(self) -> bool:
        """Whether time is contiguous, and each row has one gate for all times."""
        gates = "gates" in STRIDED[self.direction]
        return gates and self.layout == "time_last" and self.has_one_gate()

    def rows_strides(self) -> tuple[Strides, ...]:
        """Those of the tensors whose rows are read or written: all that have a time, but gates of which a row has one."""
        return self.sequence_strides()[self.one_gate_a_row() :]

    @property
    def scans(self) -> int:
        """How many there are, where no sequences are packed."""
        return self.outer * self.batch * self.channels

    def shares_gates(self) -> bool:
        """Whether channels are contiguous, and share gates."""
        contiguous = self.layout == "channel_last" and self.channels > 1
        return contiguous and self.strides_of("gates").channel == 0

    def plain(self, *, widely: bool = False) -> bool:
        """Whether nothing is broadcast, but gates along time, or mixed, and one batch dimension says it all. ``widely``: gates may
        also be broadcast along contiguous channels, and there may be two batch dimensions."""
        row, unit = (
            (self.time, "time") if self.layout == "time_last" else (self.channels, "channel")
        )
        rows = self.rows_strides()[widely and self.shares_gates() :]
        return (
            (self.outer == 1 or widely)
            and self.gates_dtype == self.dtype
            and all(row == 1 or getattr(s, unit) == 1 for s in rows)
        )

    def folds(self) -> bool:
        """Whether in every tensor one stride leads from each channel to the next, whatever its batch. A row's only gate may lie
        anywhere."""
        strides = self.strides[self.one_gate_a_row() :]
        return self.batch == 1 or all(s.batch == s.channel * self.channels for s in strides)

    def whole_chunks(self, elements: int) -> bool:
        """Whether every row starts at, and consists of, whole chunks of ``elements``."""
        if self.alignment < 16:
            return False
        row, outside = (
            (self.time, "channel") if self.layout == "time_last" else (self.channels, "time")
        )
        sizes = dict(zip(DIMENSIONS, self.sizes, strict=True))
        return row % elements == 0 and all(
            sizes[dimension] == 1 or getattr(strides, dimension) % elements == 0
            for strides in self.rows_strides()
            for dimension in ("outer", "batch", outside)
        )

    def congruent(self) -> bool:
        """Whether an element lies at the same place of its 16 bytes in every tensor that has a time, however
        rows start and end."""
        if self.alignment < 16:
            return False
        chunk, (first, *others) = self.chunk(), self.rows_strides()
        outside = "channel" if self.layout == "time_last" else "time"
        sizes = dict(zip(DIMENSIONS, self.sizes, strict=True))
        return all(
            sizes[dimension] == 1
            or (getattr(strides, dimension) - getattr(first, dimension)) % chunk == 0
            for strides in others
            for dimension in ("batch", outside)
        )

    def chunk(self) -> int:
        """Elements in 16 bytes."""
        return 16 // ITEM_SIZE[self.dtype]

    def sum_pieces(self) -> int:
        """How many partial sums over time a kernel writes for each state, at most, where ``sums``; its launch says how many.
        Of contiguous time, each is for as many steps as the smallest tile has that is a part of a row; 6 more are for what tiles have
        beyond a row's ends. Of contiguous channels, likewise, and of packed sequences each has one."""
        if self.layout == "time_last":
            return self.time // (64 * self.chunk()) + 6
        return 1 if self.sequences else self.time // SUM_STEPS + 1

    def reduction(self) -> Reduction:
        """How the sum over broadcast gates is cut into pieces."""
        gates_grad = self.strides_of("gates_grad")
        summed = [
            size > 1 and stride == 0
            for size, stride in zip(self.sizes, vars(gates_grad).values(), strict=True)
        ]
        kept = summed_batches = 1
        for size, is_summed in zip(self.sizes[:2], summed[:2], strict=True):
            if is_summed:
                summed_batches *= size
            else:
                kept *= size
        unit, other = REDUCTION_TILE
        channel, time = (other, unit) if self.layout == "time_last" else (unit, other)
        tiles = ceil_div(self.channels, channel), ceil_div(self.time, time)
        blocks = kept * tiles[0] * tiles[1]
        groups = min(summed_batches, ceil_div(REDUCTION_BLOCKS, blocks))
        pieces = groups
        for count, is_summed in zip(tiles, summed[2:], strict=True):
            pieces *= count if is_summed else 1
        return Reduction(groups, kept, tiles, pieces)


def sample_facts(layout: Layout, dtype: str, access: str, sequences: int) -> dict[str, Any]:
    """The fields of a usual problem with as many tensors along time, and a state."""
    batch, channels, time = (8, 1024, 2048) if access == "aligned" else (8, 1021, 2039)
    inner = (time, 1) if layout == "time_last" else (1, channels)
    strides = Strides(0, channels * time, *inner)
    return {
        "layout": layout,
        "dtype": dtype,
        "gates_dtype": dtype,
        "outer": 1,
        "batch": batch,
        "channels": channels,
        "time": time,
        "strides": (*(strides,) * sequences, Strides(0, channels, 1, 0)),
        "alignment": 16 if access == "aligned" else ITEM_SIZE[dtype],
    }
