"""A causal convolution as numbers: what selection and launching need to know, and no tensor.

Tensors, with W the width of the filter:

    x, y                (B, D, L)      y[t] = act(bias + Σ weight[W-1-j] · x[t-j])
    weight, bias        (D, W), (D,)   of the dtype of x, or float32
    initial_state       (B, D, W-1)    the inputs before the first step; with packed sequences (S, D, W-1)
    final_state         likewise       the last W-1 inputs, those of the initial state among them
    seq_idx             (B, L) int32   where it changes along time, a sequence ends; below zero is padding
    cu_seqlens          (S+1,) int64   between which sequences are packed along time; B is 1 then
    partials            (pieces, W+1, D) float32, sums of a backward kernel for the gradients of weight and bias
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.model import ITEM_SIZE

Direction = Literal["forward", "backward"]
Layout = Literal["time_last", "channel_last"]

#: The dtypes that kernels are built for.
DTYPES = ("float32", "bfloat16", "float16")
#: The widths of filters.
WIDTHS = range(2, 9)
#: The tensors that have strides of their own, in the kernels' order.
STRIDED: dict[Direction, tuple[str, ...]] = {
    "forward": ("x", "y"),
    "backward": ("x", "y_grad", "x_grad"),
}
#: Warps of a CTA.
WARPS = 4
_THREADS = 32 * WARPS
#: Threads that are worth more than longer work for each.
_ENOUGH = {"time_last": 80_000, "channel_last": 40_000}
#: Most chunks of a row that a thread takes; and least and most steps of its channels. Each has rows around it that are read
#: twice, of two tensors backward.
_MOST_CHUNKS = 16
_STEPS: dict[Direction, tuple[int, int]] = {"forward": (16, 32), "backward": (16, 128)}
#: Lanes of one step each exchange gradients with lanes up to 7 further. No more than a warp has share a row.
_LEAST_BITS = 3
_MOST_BITS = 5
#: The most steps that kernels count.
MOST_TIME = 2**30


@dataclass(frozen=True)
class Strides:
    """Distance between neighbours along each dimension, in elements."""

    batch: int
    channel: int
    time: int


@dataclass(frozen=True)
class Cut:
    """How a problem is cut into work for threads; see ``time_last.cuh`` and ``channel_last.cuh``.

    lane_bits  2 to this power are the lanes that share a piece of time
    steps      chunks or steps of each lane
    pieces     of time, for each batch
    ctas       of the grid
    """

    lane_bits: int
    steps: int
    pieces: int
    ctas: int


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def layout_of(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Layout | None:
    """Which dimension has unit stride in all tensors; None if none has. For a single step, channels come first."""
    ways: list[tuple[Layout, int]] = [("time_last", 2), ("channel_last", 1)]
    if shape[2] == 1 and shape[1] > 1:
        ways.reverse()
    for layout, unit in ways:
        if shape[unit] == 1 or all(of_tensor[unit] == 1 for of_tensor in strides):
            return layout
    return None


def _lane_bits(count: int) -> int:
    """The fewest lanes, of a warp, that hold ``count`` each one."""
    return min(_MOST_BITS, max(0, (count - 1).bit_length()))


@dataclass(frozen=True)
class ConvProblem:
    """One direction of one convolution.

    layout        which dimension has unit stride: time, or channels
    dtype         of every tensor but weight and bias
    strides       of the tensors that ``STRIDED`` names, in that order
    alignment     bytes, at most 16, that divide the address of each of these
    sequences     how many are packed along time; 0 if none
    indexed       whether there is a ``seq_idx``
    silu          whether the activation is x·σ(x), and not none
    wide_weights  whether weight and bias are float32 though the others are narrower
    """

    direction: Direction
    layout: Layout
    dtype: str
    batch: int
    channels: int
    time: int
    width: int
    strides: tuple[Strides, ...]
    alignment: int
    sequences: int = 0
    indexed: bool = False
    silu: bool = False
    wide_weights: bool = False

    @property
    def kernel(self) -> str:
        return f"{self.layout}_{self.direction}"

    @property
    def has_one_run(self) -> bool:
        """Whether all steps of a batch belong together."""
        return not (self.sequences or self.indexed)

    def whole_chunks(self, elements: int) -> bool:
        """Whether every row starts at, and consists of, whole chunks of ``elements``. Where time is contiguous: whether
        rows lie alike in all tensors, as to boundaries of such chunks."""
        outside = ("batch", "channel" if self.layout == "time_last" else "time")
        sizes = {"batch": self.batch, "channel": self.channels, "time": self.time}
        if self.alignment < elements * ITEM_SIZE[self.dtype]:
            return False
        phases = {
            tuple(
                getattr(strides, dimension) % elements if sizes[dimension] > 1 else 0
                for dimension in outside
            )
            for strides in self.strides
        }
        if self.layout == "time_last":
            return len(phases) == 1
        return phases == {(0, 0)} and self.channels % elements == 0

    def cut(self, vector: int) -> Cut:
        """For threads that hold ``vector`` elements."""
        if self.layout == "channel_last":
            return self._cut_columns(vector)
        # Rows that do not start at a boundary may have parts of two chunks more.
        whole = all(own.batch % vector == 0 and own.channel % vector == 0 for own in self.strides)
        chunks = ceil_div(self.time + (0 if whole else vector - 1), vector)
        rows, bits = self.batch * self.channels, _lane_bits(chunks)
        if vector == 1:
            bits = max(bits, _LEAST_BITS)
        chunks_of_lane = ceil_div(chunks, 1 << bits)
        wanted = max(1, min(_MOST_CHUNKS, (rows * chunks_of_lane << bits) // _ENOUGH[self.layout]))
        pieces = ceil_div(chunks_of_lane, wanted)
        steps = ceil_div(chunks_of_lane, pieces)
        return Cut(bits, steps, pieces, ceil_div(rows * pieces << bits, _THREADS))

    def _cut_columns(self, vector: int) -> Cut:
        bits = _lane_bits(ceil_div(self.channels, vector))
        across = ceil_div(self.channels, vector << bits)
        threads = self.batch * across << bits
        least, most = _STEPS[self.direction]
        enough = _ENOUGH[self.layout]
        wanted = max(least, min(most, self.time * threads // enough // 8 * 8))
        groups = _THREADS >> bits
        pieces = ceil_div(self.time, wanted * groups)
        steps = ceil_div(ceil_div(self.time, pieces * groups), 8) * 8
        return Cut(bits, steps, pieces, self.batch * pieces * across)

    def scalars(self, cut: Cut) -> dict[str, int]:
        """Every integer parameter of the kernels, by name."""
        sizes = ("channels", "time", "width", "sequences")
        values = {
            "batches": self.batch,
            **{name: getattr(self, name) for name in sizes},
            "lane_bits": cut.lane_bits,
            "steps": cut.steps,
            "pieces": cut.pieces,
            "flags": int(self.silu) + 2 * int(self.wide_weights),
        }
        for name, strides in zip(STRIDED[self.direction], self.strides, strict=True):
            for dimension, stride in vars(strides).items():
                values[f"{name}_{dimension}"] = stride
        return values


@dataclass(frozen=True)
class ReductionProblem:
    """The sum over a backward kernel's pieces.

    output  dtype of the gradients of weight and bias
    """

    output: str
    pieces: int
    channels: int
    width: int

    @property
    def kernel(self) -> str:
        return "reduction"

    @property
    def dtype(self) -> str:
        """That of the sums."""
        return "float32"


@dataclass(frozen=True)
class UpdateProblem:
    """A few steps of each sequence, with a state that is changed in place.

    slots        rows of the state
    length       inputs that the state has of each channel
    strides      of x, the state (whose batch is the slot) and y
    sequences    how many are packed along the time of the one batch; 0 if none are
    pad_slot_id  an index of a row that stands for no row
    wide_bounds  whether cu_seqlens are of 64 bits
    alignment    bytes, at most 16, that divide the addresses of x, the state, y, weight and bias
    in_order     whether a row's inputs stand in the order of their steps, the last one at its end: no rings and no drafts
    """

    dtype: str
    batch: int
    channels: int
    time: int
    width: int
    slots: int
    length: int
    strides: tuple[Strides, ...]
    silu: bool = False
    wide_weights: bool = False
    sequences: int = 0
    pad_slot_id: int = -1
    wide_bounds: bool = False
    alignment: int = 1
    in_order: bool = True

    @property
    def kernel(self) -> str:
        return "update"

    @property
    def vector(self) -> int:
        """Channels of a thread: four that lie together, if the kernel has a way for their rows of the state; else one."""
        x, state, y = self.strides
        together = x.channel == y.channel == 1 and (state.channel == 1 or self._has_whole_rows)
        size = 4 if self.wide_weights else ITEM_SIZE[self.dtype]
        fits = self.width == 4 and self.alignment >= 4 * size
        outside = [(self.batch, x.batch), (self.batch, y.batch), (self.slots, state.batch)]
        outside += [(self.time, x.time), (self.time, y.time)]
        if state.channel == 1:
            outside.append((self.length, state.time))
        whole = all(stride % 4 == 0 for count, stride in outside if count > 1)
        return 4 if together and fits and whole and self.channels % 4 == 0 else 1

    @property
    def _has_whole_rows(self) -> bool:
        """Whether one step reads a channel's inputs, three or four in order, as they lie together."""
        alone = self.time == 1 and not self.sequences and self.in_order
        return (
            alone and self.strides[1].time == 1 and self.strides[1].channel == self.length in (3, 4)
        )

    def scalars(self) -> dict[str, int]:
        """Every integer parameter of the kernel, by name."""
        sizes = ("channels", "time", "width", "slots", "length")
        values = {
            "sequences": self.sequences or self.batch,
            **{name: getattr(self, name) for name in sizes},
            "pad_slot": self.pad_slot_id,
            "flags": int(self.silu)
            + 2 * int(self.wide_weights)
            + 4 * int(self.wide_bounds)
            + 8 * (self.vector > 1),
        }
        for name, first, strides in zip(
            ("x", "state", "y"), ("batch", "slot", "batch"), self.strides, strict=True
        ):
            # Packed sequences are told apart by cu_seqlens, in the one batch of x and y.
            packed = self.sequences and first == "batch"
            values[f"{name}_{first}"] = 0 if packed else strides.batch
            values |= {f"{name}_channel": strides.channel, f"{name}_time": strides.time}
        return values
