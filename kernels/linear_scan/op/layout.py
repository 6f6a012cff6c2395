"""How tensors of any rank lie in memory, as (outer, batch, channels, time).

Pure arithmetic on shapes and strides. The kernels need one dimension of unit stride, the same in
every tensor that is not broadcast along it: time, or channels. The other dimensions are folded
together where their strides allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.linear_scan.gates_sum import GatesSumProblem
from scan_registry.kernels.linear_scan.problem import Layout, LinearScanProblem, Strides
from scan_registry.ops.operator import SingleCall

_FOLDED = 3  # dimensions beside time


@dataclass(frozen=True)
class Arrangement:
    """Several tensors of one shape, seen as (outer, batch, channels, time)."""

    layout: Layout
    outer: int
    batch: int
    channels: int
    time: int
    strides: tuple[Strides, ...]


@dataclass(frozen=True)
class KernelCall(SingleCall[LinearScanProblem]):
    """One kernel's part in an operator's call: its problem, and the names of the inputs that are copied first.

    gates_shape   the shape in which gates are written out before the launch, by ``calls.shape_for_channels``; or None
    is_broadcast  whether gates have another shape than the states, and so their gradient, too
    """

    gates_shape: tuple[int, ...] | None = None
    is_broadcast: bool = False

    @property
    def after_fused(self) -> bool | None:
        """A kernel that sums up gates' gradient leaves nothing for a reduction to read."""
        return False if self.problem.direction == "reduction" else None

    def fused(self) -> LinearScanProblem | None:
        """The problem of a backward kernel that also sums up the gradient of gates that do not change with
        time; None if there can be none. It is for kernels that need not be compiled first."""
        problem = self.problem
        if self.copied or not self.is_broadcast or problem.direction != "backward":
            return None
        return replace(problem, sums=True) if problem.has_one_gate() else None


class TotalCall(SingleCall[GatesSumProblem]):
    """The total of the sums that a backward kernel leaves of gates' gradient."""

    @property
    def after_fused(self) -> bool:
        """No other kernel leaves sums."""
        return True


@dataclass(frozen=True)
class _Axis:
    size: int
    strides: tuple[int, ...]  # one per tensor

    def is_unit(self, count: int) -> bool:
        """Whether the first ``count`` tensors have stride 1 along it, those aside that are broadcast."""
        return 1 in self.strides[:count] and {*self.strides[:count]} <= {0, 1}


def _fold(axes: list[_Axis]) -> list[_Axis]:
    """Merge neighbours wherever, in every tensor, the outer one steps over whole inner ones. The last
    tensors are dense, and set the order."""
    folded: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.strides[::-1], reverse=True):
        outer = folded[-1] if folded else None
        if outer and all(
            o == i * axis.size for o, i in zip(outer.strides, axis.strides, strict=True)
        ):
            folded[-1] = _Axis(outer.size * axis.size, axis.strides)
        else:
            folded.append(axis)
    return folded


def _other_axes(shape: Sequence[int], dim: int, tensors: Sequence[Sequence[int]]) -> list[_Axis]:
    """Of all dimensions but time, those of several elements."""
    return [
        _Axis(size, tuple(strides[d] for strides in tensors))
        for d, size in enumerate(shape)
        if d != dim and size > 1
    ]


def arrange(
    shape: Sequence[int],
    dim: int,
    sequences: Sequence[Sequence[int]],
    states: Sequence[Sequence[int]] = (),
) -> Arrangement | None:
    """Tensors of ``shape`` as (outer, batch, channels, time), time being ``dim``: first those that
    have a time, by their strides, then those of ``states``, whose stride along ``dim`` is the one
    between sequences and which need no unit stride.

    None if no dimension has unit stride in all sequences, those aside that are broadcast along it, or
    if the dimensions do not fold: then a copy is needed. Strides are in elements; those of dimensions
    of size 1 do not count.
    """
    count = len(sequences)
    tensors = [*sequences, *states]
    missing = _Axis(1, (0,) * len(tensors))
    along = tuple(strides[dim] for strides in tensors)
    time = _Axis(shape[dim], along if shape[dim] > 1 else (*(0,) * count, *along[count:]))
    others = _fold(_other_axes(shape, dim, tensors))
    if len(others) > _FOLDED:
        return None

    if time.is_unit(count):
        outer, batch, channel = ([missing] * _FOLDED + others)[-_FOLDED:]
        return _arrangement("time_last", outer, batch, channel, time)
    contiguous = [axis for axis in others if axis.is_unit(count)]
    if contiguous or not (others or time.size > 1):
        channel = contiguous[-1] if contiguous else missing
        outer, batch = ([missing] * 2 + [axis for axis in others if axis is not channel])[-2:]
        return _arrangement("channel_last", outer, batch, channel, time)
    return None


def _arrangement(
    layout: Layout, outer: _Axis, batch: _Axis, channel: _Axis, time: _Axis
) -> Arrangement:
    axes = outer, batch, channel, time
    strides = tuple(Strides(*own) for own in zip(*(axis.strides for axis in axes), strict=True))
    return Arrangement(layout, outer.size, batch.size, channel.size, time.size, strides)


def arrange_with_copies(
    shape: Sequence[int],
    dim: int,
    inputs: Sequence[Sequence[int]],
    dense: Sequence[int],
    states: Sequence[Sequence[int]] = (),
) -> tuple[Arrangement, tuple[bool, ...]]:
    """The inputs, and an output of strides ``dense``, as the kernels want them, and which inputs have to be copied to those
    strides first: as few as possible, the earlier ones rather than the later.

    ``dense`` are strides without gaps in any order of the dimensions, which always fit.
    """
    for kept in sorted(product((True, False), repeat=len(inputs)), key=_preference):
        strides = [own if keep else dense for own, keep in zip(inputs, kept, strict=True)]
        arranged = arrange(shape, dim, [*strides, dense], states)
        if arranged is not None:
            return arranged, tuple(not keep for keep in kept)
    raise AssertionError(f"strides {dense} of shape {shape} are not dense")


def _preference(kept: tuple[bool, ...]) -> tuple[int, tuple[bool, ...]]:
    return -sum(kept), kept
