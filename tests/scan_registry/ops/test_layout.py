"""Arrangements: every row of every tensor, once, and as few demands for a copy as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scan_registry.ops.layout import Arrangement, arrange

Strides = tuple[int, ...]


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int]) -> Strides:
    """Strides as slicing, permuting and expanding leave them."""
    strides, step = [0] * len(shape), 1
    for d in draw(st.permutations(range(len(shape)))):
        taken_every = draw(st.sampled_from([1, 1, 1, 1, 2]))
        strides[d] = step * taken_every
        step *= shape[d] * taken_every + draw(st.sampled_from([0, 0, 0, 3]))
    expanded = (
        draw(st.sets(st.integers(0, len(shape) - 1), max_size=2)) if draw(st.booleans()) else ()
    )
    for d in expanded:
        strides[d] = 0
    return tuple(strides)


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[int, ...], int, list[Strides]]:
    """Shape, dim, and the strides of one to four tensors, often the same for all of them."""
    shape = draw(SHAPES)
    dim = draw(st.integers(0, len(shape) - 1))
    count = draw(st.integers(1, 4))
    if draw(st.booleans()):
        return shape, dim, [draw(layouts(shape))] * count
    return shape, dim, [draw(layouts(shape)) for _ in range(count)]


def rows(shape: Sequence[int], dim: int, strides: Sequence[Strides]) -> Counter[tuple[int, ...]]:
    """Where each row starts, in all tensors at once: gates and tokens of a row belong together."""
    others = [d for d in range(len(shape)) if d != dim]
    return Counter(
        tuple(sum(i * s[d] for i, d in zip(index, others, strict=True)) for s in strides)
        for index in product(*(range(shape[d]) for d in others))
    )


def arranged_rows(arranged: Arrangement) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(b * s.batch + c * s.channel for s in arranged.strides)
        for b in range(arranged.batch)
        for c in range(arranged.channels)
    )


def axes_after_folding(shape: Sequence[int], dim: int, strides: Sequence[Strides]) -> int:
    """The fewest axes beside time that loops over all rows need, by trying every order."""
    others = [d for d in range(len(shape)) if d != dim and shape[d] > 1]
    fewest = len(others)
    for order in permutations(others):
        breaks = sum(
            any(s[outer] != s[inner] * shape[inner] for s in strides)
            for outer, inner in pairwise(order)
        )
        fewest = min(fewest, breaks + 1) if others else 0
    return fewest


@settings(max_examples=800, deadline=None)
@given(calls())
def test_arrangements(call: tuple[tuple[int, ...], int, list[Strides]]) -> None:
    shape, dim, strides = call
    arranged = arrange(shape, dim, strides)
    long = [d for d in range(len(shape)) if shape[d] > 1]
    units = [d for d in long if all(s[d] == 1 for s in strides)]
    if arranged is None:
        assert (long and not units) or axes_after_folding(shape, dim, strides) > 2
        return
    assert units or not long
    assert rows(shape, dim, strides) == arranged_rows(arranged)
    assert arranged.time == shape[dim]
    assert len(arranged.strides) == len(strides)
    for out, given_ in zip(arranged.strides, strides, strict=True):
        assert arranged.time == 1 or out.time == given_[dim]
        unit, size = {
            "time_last": (out.time, arranged.time),
            "channel_last": (out.channel, arranged.channels),
        }[arranged.layout]
        assert unit == 1 or size == 1
    if dim in units:
        assert arranged.layout == "time_last"


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.data())
def test_elements_through_torch(shape: tuple[int, ...], data: st.DataObject) -> None:
    """The same, on a real tensor: the views' sequences are the tensor's."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    order = data.draw(st.permutations(range(len(shape))))
    numel = torch.Size(shape).numel()
    dense = torch.arange(numel).view([shape[d] for d in order])
    tensor = dense.permute([order.index(d) for d in range(len(shape))])
    assert tensor.shape == shape
    arranged = arrange(tensor.shape, dim, [tensor.stride()])
    assert arranged is not None  # dense: nothing to copy, whatever the order of the dimensions
    (strides,) = arranged.strides
    view = dense.as_strided(
        (arranged.batch, arranged.channels, arranged.time),
        (strides.batch, strides.channel, strides.time),
    )
    sequences = tensor.movedim(dim, -1).reshape(-1, shape[dim])
    assert sorted(view.reshape(-1, shape[dim]).tolist()) == sorted(sequences.tolist())


@given(SHAPES)
def test_contiguous_tensors_always_arrange(shape: tuple[int, ...]) -> None:
    strides = torch.empty(shape, device="meta").stride()
    for dim in range(len(shape)):
        assert arrange(shape, dim, [strides] * 3) is not None


@pytest.mark.parametrize(
    ("shape", "dim", "strides", "layout", "folded"),
    [
        ((2, 3, 5), -1, (15, 5, 1), "time_last", (1, 6, 5)),
        ((2, 3, 5), 1, (15, 5, 1), "channel_last", (2, 5, 3)),
        ((2, 3, 5), 0, (15, 5, 1), "channel_last", (1, 15, 2)),
        ((2, 5, 3), -1, (15, 1, 5), "channel_last", (2, 5, 3)),  # (B, T, D) seen as (B, D, T)
        ((2, 3, 5), -1, (30, 10, 1), "time_last", (1, 6, 5)),  # x[..., :5] of (2, 3, 10)
        ((2, 3, 5), -1, (60, 10, 1), "time_last", (2, 3, 5)),  # x[:, ::2, :5] of (2, 6, 10)
        ((2, 3, 4, 5), 1, (60, 20, 5, 1), "channel_last", (2, 20, 3)),
        ((7,), 0, (1,), "time_last", (1, 1, 7)),
        ((1, 1), 0, (1, 1), "channel_last", (1, 1, 1)),
        ((7, 1), 1, (1, 1), "channel_last", (1, 7, 1)),
        ((4, 5), 1, (0, 1), "time_last", (1, 4, 5)),  # one row for all of the batch
    ],
)
def test_examples(
    shape: tuple[int, ...], dim: int, strides: Strides, layout: str, folded: tuple[int, int, int]
) -> None:
    arranged = arrange(shape, dim % len(shape), [strides])
    assert arranged is not None
    found = (arranged.batch, arranged.channels, arranged.time)
    assert (arranged.layout, found) == (layout, folded)


def test_what_needs_a_copy() -> None:
    assert arrange((4, 5), 1, [(10, 2)]) is None  # no unit stride
    assert arrange((4, 5), 1, [(5, 1), (1, 4)]) is None  # unit strides, but no common one
    assert arrange((4, 5), 1, [(5, 1), (0, 0)]) is None  # a scalar, expanded
    assert arrange((2, 2, 2, 5), 3, [(100, 40, 10, 1)]) is None  # three axes that do not fold
