"""Arrangements: every row of every tensor, once, and as few demands for a copy as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, permutations, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scan_registry.base.strides import dense_strides, memory_order
from scan_registry.kernels.linear_scan.op.layout import Arrangement, arrange, arrange_with_copies
from scan_registry.ops.strides import as_new

Strides = tuple[int, ...]


#: How a dimension lies: one of how many elements is taken, how many are left out at its end, and
#: whether it is expanded instead.
DENSE, SLICED, CUT, EXPANDED = (1, 0, False), (2, 0, False), (1, 3, False), (1, 0, True)
STRIDED = st.sampled_from([DENSE] * 6 + [SLICED, CUT])
BROADCAST = st.sampled_from([DENSE] * 4 + [EXPANDED] * 3 + [SLICED])


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int]) -> Strides:
    """Strides as slicing, permuting and expanding leave them."""
    strides, step = [0] * len(shape), 1
    kinds = draw(st.sampled_from([STRIDED, BROADCAST]))
    for d in draw(st.permutations(range(len(shape)))):
        every, gap, expanded = draw(kinds)
        strides[d] = 0 if expanded else step * every
        step *= shape[d] * every + gap
    return tuple(strides)


@st.composite
def dense_layouts(draw: st.DrawFn, shape: Sequence[int]) -> Strides:
    return dense_strides(shape, draw(st.permutations(range(len(shape)))))


SHAPES = st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6).map(tuple)


@st.composite
def calls(
    draw: st.DrawFn, *, dense: bool = True
) -> tuple[tuple[int, ...], int, list[Strides], list[Strides]]:
    """Shape, dim, the strides of one to four tensors, often the same for all of them, and of up to
    two states; the very last tensor is ``dense``, as in every call of the operator."""
    shape = draw(SHAPES)
    dim = draw(st.integers(0, len(shape) - 1))
    count = draw(st.integers(1, 4))
    if draw(st.booleans()):
        sequences = [draw(layouts(shape))] * count
    else:
        sequences = [draw(layouts(shape)) for _ in range(count)]
    of_states = [*shape]
    of_states[dim] = draw(st.sampled_from([1, 3]))
    states = [draw(layouts(of_states)) for _ in range(draw(st.integers(0, 1)))]
    if dense:
        if draw(st.booleans()):
            states.append(draw(dense_layouts(of_states)))
        else:
            sequences.append(draw(dense_layouts(shape)))
            states = []
    return shape, dim, sequences, states


def rows(shape: Sequence[int], dim: int, strides: Sequence[Strides]) -> Counter[tuple[int, ...]]:
    """Where each row starts, in all tensors at once: gates, tokens and states of a row belong
    together."""
    others = [d for d in range(len(shape)) if d != dim]
    return Counter(
        tuple(sum(i * s[d] for i, d in zip(index, others, strict=True)) for s in strides)
        for index in product(*(range(shape[d]) for d in others))
    )


def arranged_rows(arranged: Arrangement) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(o * s.outer + b * s.batch + c * s.channel for s in arranged.strides)
        for o in range(arranged.outer)
        for b in range(arranged.batch)
        for c in range(arranged.channels)
    )


def axes_after_folding(shape: Sequence[int], dim: int, strides: Sequence[Strides]) -> int:
    """The fewest axes beside time that loops over all rows need, by trying every order."""
    others = [d for d in range(len(shape)) if d != dim and shape[d] > 1]
    folds = {
        (outer, inner)
        for outer, inner in permutations(others, 2)
        if all(s[outer] == s[inner] * shape[inner] for s in strides)
    }
    return len(others) - max(sum(p in folds for p in pairwise(o)) for o in permutations(others))


def unit_dimensions(shape: Sequence[int], sequences: Sequence[Strides]) -> list[int]:
    """Those along which every tensor is contiguous or broadcast, and one at least contiguous."""
    return [
        d for d in range(len(shape)) if shape[d] > 1 and {s[d] for s in sequences} in ({1}, {0, 1})
    ]


def check_rows(
    arranged: Arrangement,
    shape: Sequence[int],
    dim: int,
    sequences: Sequence[Strides],
    states: Sequence[Strides],
) -> None:
    tensors = [*sequences, *states]
    assert rows(shape, dim, tensors) == arranged_rows(arranged)
    assert arranged.time == shape[dim]
    assert len(arranged.strides) == len(tensors)
    for index, (out, given_) in enumerate(zip(arranged.strides, tensors, strict=True)):
        if index >= len(sequences) or arranged.time > 1:
            assert out.time == given_[dim]
    units = [
        {"time_last": out.time, "channel_last": out.channel}[arranged.layout]
        for out in arranged.strides[: len(sequences)]
    ]
    size = arranged.time if arranged.layout == "time_last" else arranged.channels
    assert size == 1 or set(units) in ({1}, {0, 1})


@settings(max_examples=5 * settings.default.max_examples)
@given(calls())
def test_arrangements(
    call: tuple[tuple[int, ...], int, list[Strides], list[Strides]],
) -> None:
    shape, dim, sequences, states = call
    arranged = arrange(shape, dim, sequences, states)
    long = [d for d in range(len(shape)) if shape[d] > 1]
    units = unit_dimensions(shape, sequences)
    fits = bool(units or not long) and axes_after_folding(shape, dim, [*sequences, *states]) <= 3
    assert (arranged is not None) == fits
    if arranged is None:
        return
    check_rows(arranged, shape, dim, sequences, states)
    assert (arranged.layout == "time_last") == (dim in units)


@settings(max_examples=3 * settings.default.max_examples)
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
        (arranged.outer, arranged.batch, arranged.channels, arranged.time),
        (strides.outer, strides.batch, strides.channel, strides.time),
    )
    sequences = tensor.movedim(dim, -1).reshape(-1, shape[dim])
    assert sorted(view.reshape(-1, shape[dim]).tolist()) == sorted(sequences.tolist())


@given(SHAPES, st.data())
def test_gates_that_are_broadcast_anywhere_are_not_copied(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Beside contiguous tokens, up to the three dimensions that kernels loop over."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    summed = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    of_gates = [1 if d in summed else size for d, size in enumerate(shape)]
    gates = torch.empty(of_gates, device="meta").expand(shape).stride()
    tokens = torch.empty(shape, device="meta").stride()
    arranged = arrange(shape, dim, [gates, tokens, tokens])
    assert (arranged is not None) == (axes_after_folding(shape, dim, [gates, tokens]) <= 3)
    if arranged is not None:
        check_rows(arranged, shape, dim, [gates, tokens, tokens], [])


# --- Copies -----------------------------------------------------------------------------------


@given(SHAPES, st.data())
def test_as_few_inputs_as_possible_are_copied(shape: tuple[int, ...], data: st.DataObject) -> None:
    """And of as few, the earlier ones. What was copied lies as the output does."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    inputs = [data.draw(layouts(shape)) for _ in range(data.draw(st.integers(1, 3)))]
    dense = data.draw(dense_layouts(shape))
    of_states = [*shape]
    of_states[dim] = data.draw(st.sampled_from([1, 3]))
    state = dense_strides(of_states, memory_order(dense))
    arranged, copied = arrange_with_copies(shape, dim, inputs, dense, states=[state])

    def laid_out(copies: Sequence[bool]) -> list[Strides]:
        return [dense if copy else own for copy, own in zip(copies, inputs, strict=True)]

    assert arranged == arrange(shape, dim, [*laid_out(copied), dense], [state])
    check_rows(arranged, shape, dim, [*laid_out(copied), dense], [state])
    for other in product((True, False), repeat=len(inputs)):
        if (sum(other), [not c for c in other]) < (sum(copied), [not c for c in copied]):
            assert arrange(shape, dim, [*laid_out(other), dense], [state]) is None


@given(SHAPES, st.data())
def test_dense_strides_are_those_of_torch(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    dense = torch.empty([shape[d] for d in order], device="meta")
    tensor = dense.permute([order.index(d) for d in range(len(shape))])
    assert dense_strides(shape, order) == tensor.stride()
    long = [d for d in range(len(shape)) if shape[d] > 1]
    assert [d for d in memory_order(tensor.stride()) if d in long] == [
        d for d in order if d in long
    ]


@given(st.data())
def test_what_is_like_a_tensor_lies_as_torch_has_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4))
    strides = [*data.draw(st.one_of(layouts(shape), dense_layouts(shape)))]
    for d in (d for d, size in enumerate(shape) if size == 1):
        strides[d] = data.draw(st.sampled_from([0, 1, 5, strides[d]]))
    tensor = torch.empty(10_000).as_strided(shape, strides)
    assert as_new(tensor).stride() == torch.empty_like(tensor).stride()
    assert as_new(tensor).shape == tensor.shape
