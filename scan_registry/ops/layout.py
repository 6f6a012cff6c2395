"""How tensors of any rank lie in memory, as (batch, channels, time).

Pure arithmetic on shapes and strides. The kernels need one dimension of unit stride, the same in
every tensor: time, or channels. The other dimensions are folded together where their strides allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from scan_registry.kernels.linear_scan.problem import Layout, Strides
from scan_registry.kernels.model import Problem


@dataclass(frozen=True)
class Arrangement:
    """Several tensors of one shape, seen as (batch, channels, time)."""

    layout: Layout
    batch: int
    channels: int
    time: int
    strides: tuple[Strides, ...]


@dataclass(frozen=True)
class Share:
    """One kernel's share of a call: its problem, and the names of the inputs that are copied first."""

    problem: Problem
    copied: tuple[str, ...]


@dataclass(frozen=True)
class _Axis:
    size: int
    strides: tuple[int, ...]  # one per tensor


def _fold(axes: list[_Axis]) -> list[_Axis]:
    """Merge neighbours wherever, in every tensor, the outer one steps over whole inner ones."""
    folded: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.strides, reverse=True):
        outer = folded[-1] if folded else None
        if outer and all(
            o == i * axis.size for o, i in zip(outer.strides, axis.strides, strict=True)
        ):
            folded[-1] = _Axis(outer.size * axis.size, axis.strides)
        else:
            folded.append(axis)
    return folded


def arrange(
    shape: Sequence[int], dim: int, tensor_strides: Sequence[Sequence[int]]
) -> Arrangement | None:
    """Tensors of ``shape`` with these strides as (batch, channels, time), time being ``dim``.

    None if no dimension has unit stride in all of them, or if the dimensions do not fold: then a
    copy is needed. Strides are in elements; those of dimensions of size 1 do not count.
    """
    count = len(tensor_strides)
    missing = _Axis(1, (0,) * count)
    time = _Axis(shape[dim], tuple(strides[dim] for strides in tensor_strides))
    if time.size == 1:
        time = missing
    others = _fold(
        [
            _Axis(size, tuple(strides[d] for strides in tensor_strides))
            for d, size in enumerate(shape)
            if d != dim and size > 1
        ]
    )
    if len(others) > 2:
        return None
    unit = (1,) * count
    if time.strides == unit:
        batch, channel = ([missing] * 2 + others)[-2:]
        return _arrangement("time_last", batch, channel, time)
    contiguous = [axis for axis in others if axis.strides == unit]
    if contiguous or not (others or time.size > 1):
        channel = contiguous[0] if contiguous else missing
        batch = next((axis for axis in others if axis is not channel), missing)
        return _arrangement("channel_last", batch, channel, time)
    return None


def _arrangement(layout: Layout, batch: _Axis, channel: _Axis, time: _Axis) -> Arrangement:
    strides = tuple(
        Strides(*each) for each in zip(batch.strides, channel.strides, time.strides, strict=True)
    )
    return Arrangement(layout, batch.size, channel.size, time.size, strides)


def arrange_with_copies(
    shape: Sequence[int], dim: int, inputs: Sequence[Sequence[int]], dense: Sequence[int]
) -> tuple[Arrangement, tuple[bool, ...]]:
    """The inputs and an output of strides ``dense`` as the kernels want them, and which inputs have to
    be copied to those strides first: as few as possible, the earlier ones rather than the later.

    ``dense`` are strides without gaps in any order of the dimensions, which always fit.
    """
    for kept in sorted(product((True, False), repeat=len(inputs)), key=_preference):
        strides = [own if keep else dense for own, keep in zip(inputs, kept, strict=True)]
        arranged = arrange(shape, dim, [*strides, dense])
        if arranged is not None:
            return arranged, tuple(not keep for keep in kept)
    raise AssertionError(f"strides {dense} of shape {shape} are not dense")


def _preference(kept: tuple[bool, ...]) -> tuple[int, tuple[bool, ...]]:
    return -sum(kept), kept
