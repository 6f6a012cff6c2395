"""``linear_scan`` with every option, on the CPU, against the recurrence written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import ROUNDING, compute_dtype, wide
from torch import Tensor

from scan_registry import linear_scan
from scan_registry.ops.checks import common_shape

Oracle = Callable[..., tuple[Tensor, Tensor]]

PAIRS = [
    *[(torch.float64, torch.float64)] * 4,
    (torch.complex128, torch.complex128),
    (torch.float64, torch.complex128),
    (torch.float32, torch.float32),
    (torch.complex64, torch.complex64),
    (torch.complex64, torch.float32),
    (torch.float32, torch.complex64),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4)


@settings(deadline=None)  # torch imports sympy the first time
@given(SHAPES, SHAPES)
def test_shapes_broadcast_as_torch_has_it(one: list[int], other: list[int]) -> None:
    try:
        expected = tuple(torch.broadcast_shapes(tuple(one), tuple(other)))
    except RuntimeError:
        expected = None
    assert common_shape(one, other) == expected
    assert common_shape(torch.Size(one), tuple(other)) == expected


# --- Any call at all --------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """A tensor as views leave it: of a base whose dimensions are in another order, longer, or single
    and expanded. The base is what has a gradient."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    every: tuple[int, ...]
    before: tuple[int, ...]
    expanded: tuple[bool, ...]

    def base_shape(self) -> list[int]:
        sizes = [
            1 if alone else first + size * step
            for size, step, first, alone in zip(
                self.shape, self.every, self.before, self.expanded, strict=True
            )
        ]
        return [sizes[d] for d in self.order]

    def of(self, base: Tensor) -> Tensor:
        out = base.permute([self.order.index(d) for d in range(len(self.order))])
        for d, size in enumerate(self.shape):
            if self.expanded[d]:
                out = out.expand([size if i == d else n for i, n in enumerate(out.shape)])
            else:
                out = out.narrow(d, self.before[d], size * self.every[d])
                index = (slice(None),) * d + (slice(None, None, self.every[d]),)
                out = out[index]
        assert out.shape == self.shape
        return out


@dataclass(frozen=True)
class Call:
    """A call: how each tensor lies, what wants a gradient, what the loss is made of."""

    views: tuple[View, View, View | None]
    dtypes: tuple[torch.dtype, torch.dtype]
    dim: int
    reverse: bool
    bounds: tuple[int, ...] | None
    bounds_dtype: torch.dtype
    final: bool
    backend: str
    wanted: tuple[bool, bool, bool]
    loss: str
    seed: int

    def options(self) -> dict[str, Any]:
        bounds = None
        if self.bounds is not None:
            bounds = torch.tensor(self.bounds, dtype=self.bounds_dtype)
        return {"dim": self.dim, "reverse": self.reverse, "cu_seqlens": bounds}


FIXED = st.sampled_from([(1, 0)] * 5 + [(2, 0), (1, 2), (3, 1)])


@st.composite
def views(draw: st.DrawFn, shape: Sequence[int]) -> View:
    rank = len(shape)
    if draw(st.booleans()):
        identity, ones, zeros = tuple(range(rank)), (1,) * rank, (0,) * rank
        return View(tuple(shape), identity, ones, zeros, (False,) * rank)
    order = tuple(draw(st.permutations(range(rank))))
    cuts = draw(st.lists(FIXED, min_size=rank, max_size=rank))
    expanded = draw(st.lists(st.sampled_from([False] * 4 + [True]), min_size=rank, max_size=rank))
    every, before = zip(*cuts, strict=True) if cuts else ((), ())
    return View(tuple(shape), order, every, before, tuple(expanded))


def broadcast(draw: st.DrawFn, shape: Sequence[int]) -> list[int]:
    """``shape`` with single dimensions in place of some, and without some of the leading ones."""
    single = draw(st.sets(st.integers(0, max(0, len(shape) - 1))))
    out = [1 if d in single else size for d, size in enumerate(shape)]
    dropped = 0
    while dropped < len(out) and out[dropped] == 1 and draw(st.booleans()):
        dropped += 1
    return out[dropped:]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 0]), min_size=0, max_size=3))
    time = draw(st.sampled_from([5, 1, 2, 3, 9, 0]))
    place = draw(st.integers(0, len(sizes)))
    full = [*sizes[:place], time, *sizes[place:]]
    of_gates, of_tokens = full, full
    if draw(st.booleans()):
        of_gates = broadcast(draw, full)
        if draw(st.integers(0, 3)) == 0:
            of_tokens = broadcast(draw, full)
    shape = torch.broadcast_shapes(tuple(of_gates), tuple(of_tokens))
    if not shape:
        of_tokens, shape = [time], torch.Size([time])
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    steps = shape[dim]
    bounds = None
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, steps), max_size=4))
        bounds = (0, *sorted(inner), steps)
    of_state = [*shape]
    of_state[dim : dim + 1 or None] = [] if bounds is None else [len(bounds) - 1]
    initial = draw(views(broadcast(draw, of_state))) if draw(st.booleans()) else None
    final = draw(st.booleans())
    wanted = draw(st.tuples(st.booleans(), st.booleans(), st.just(initial is not None)))
    return Call(
        views=(draw(views(of_gates)), draw(views(of_tokens)), initial),
        dtypes=draw(st.sampled_from(PAIRS)),
        dim=dim,
        reverse=draw(st.booleans()),
        bounds=bounds,
        bounds_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        final=final,
        backend=draw(st.sampled_from(["auto", "auto", "auto", "reference"])),
        wanted=wanted,
        loss=draw(st.sampled_from(["both", "states", "sum", "final"])) if final else "states",
        seed=draw(st.integers(0, 2**16)),
    )


def bases(call: Call) -> list[Tensor | None]:
    """Random tensors for the views: gates of |gate| ≤ 1, some of them zero."""
    generator = torch.Generator().manual_seed(call.seed)
    drawn: list[Tensor | None] = []
    dtypes = (*call.dtypes, torch.promote_types(*map(compute_dtype, call.dtypes)))
    for view, dtype in zip(call.views, dtypes, strict=True):
        if view is None:
            drawn.append(None)
            continue
        shape = view.base_shape()
        exact = torch.complex128 if dtype.is_complex else torch.float64
        if drawn:
            value = torch.randn(shape, generator=generator, dtype=exact)
        else:
            size = torch.rand(shape, generator=generator, dtype=torch.float64)
            angle = 6.3 * torch.rand(shape, generator=generator, dtype=torch.float64)
            value = torch.polar((1.1 * size - 0.1).clamp_min(0), angle)
            value = value if dtype.is_complex else value.real
        drawn.append(value.to(dtype))
    return drawn


def weights(call: Call, *outputs: Tensor) -> list[Tensor | None]:
    """What the loss multiplies states and final states by; None where they are not in it."""
    generator = torch.Generator().manual_seed(call.seed + 1)
    states, *last = (
        torch.randn(out.shape, generator=generator, dtype=wide(out).dtype).to(out.dtype)
        for out in outputs
    )
    if call.loss == "sum":
        return [torch.ones((), dtype=states.dtype).expand(states.shape), *last]
    return [
        None if call.loss == "final" else states,
        *(None if call.loss == "states" else w for w in last),
    ]


def run(
    function: Callable[..., Any], call: Call, leaves: list[Tensor | None], **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of a call on views of ``leaves``, and those leaves that want gradients."""
    for leaf, want in zip(leaves, call.wanted, strict=True):
        if leaf is not None:
            leaf.requires_grad_(want)
    tensors = [
        None if leaf is None or view is None else view.of(leaf)
        for leaf, view in zip(leaves, call.views, strict=True)
    ]
    found = function(*tensors, **call.options(), **options)
    wanting = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return list(found) if isinstance(found, tuple) else [found], wanting


def gradients(
    outputs: list[Tensor], inputs: list[Tensor], given_weights: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Of the loss, in ``inputs``; None in those that no output comes from."""
    used = [
        (out, w.to(out.dtype))
        for out, w in zip(outputs, given_weights, strict=True)
        if w is not None and out.requires_grad
    ]
    if not used or not inputs:
        return (None,) * len(inputs)
    of_outputs, of_weights = zip(*used, strict=True)
    return torch.autograd.grad(of_outputs, inputs, of_weights, allow_unused=True)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(calls())
def test_any_call(plainly: Oracle, call: Call) -> None:
    """Values, shapes, dtypes and gradients; the gradients reach the bases through the views."""
    leaves = bases(call)
    copies = [None if leaf is None else leaf.clone() for leaf in leaves]
    options = {"return_final_state": call.final, "backend": call.backend}
    found, inputs = run(linear_scan, call, leaves, **options)
    wide_leaves = [None if copy is None else wide(copy) for copy in copies]
    expected, wide_inputs = run(plainly, call, wide_leaves)
    expected = expected[: len(found)]
    # Terms may cancel, so rounding errors are in proportion to the same scan of what has no sign.
    sizes, _ = run(plainly, call, [None if t is None else t.detach().abs() for t in wide_leaves])

    gates, tokens = call.dtypes
    states = gates if gates.is_complex and not tokens.is_complex else tokens
    assert [out.dtype for out in found] == [states, compute_dtype(states)][: len(found)]
    rounding = max(ROUNDING[dtype] for dtype in {gates, tokens, states})
    for out, ref, size in zip(found, expected, sizes[: len(found)], strict=True):
        assert out.shape == ref.shape
        assert_close(out, ref, rounding * 16, largest(size))
    of_outputs = weights(call, *found)
    grads = gradients(found, inputs, of_outputs)
    by_hand = gradients(expected, wide_inputs, of_outputs)
    for leaf, grad, ref in zip(inputs, grads, by_hand, strict=True):
        assert grad is not None
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        exact = torch.zeros_like(wide(grad)) if ref is None else ref
        # Terms of a sum over what is broadcast may cancel.
        assert_close(grad, exact, rounding * 64, largest(exact) + 10)
    for leaf, copy in zip(leaves, copies, strict=True):
        assert leaf is None or copy is None or torch.equal(leaf.detach(), copy)


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def assert_close(out: Tensor, expected: Tensor, tolerance: float, scale: float) -> None:
    error = largest(wide(out.detach()) - expected.detach())
    assert error <= tolerance * scale, f"off by {error}, where values reach {scale}"


# --- In pieces --------------------------------------------------------------------------------


def scan_in_chunks(
    gates: Tensor, tokens: Tensor, initial: Tensor, cuts: list[int], reverse: bool
) -> tuple[Tensor, Tensor]:
    """A scan along the last dimension, chunk after chunk, each from where the one before ended."""
    state, chunks = initial, []
    pieces = [slice(begin, end) for begin, end in pairwise(cuts)]
    for piece in reversed(pieces) if reverse else pieces:
        states, state = linear_scan(
            gates[..., piece],
            tokens[..., piece],
            state,
            reverse=reverse,
            return_final_state=True,
        )
        chunks.append(states)
    return torch.cat(chunks[::-1] if reverse else chunks, -1), state


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_chunks_make_the_whole(transposed: bool, dtype: torch.dtype, reverse: bool) -> None:
    """States, final state and gradients, with chunks of every length from none to most."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    gates = torch.rand(2, 3, 40, generator=generator, dtype=torch.float64).to(dtype)
    tokens = torch.randn(2, 3, 40, generator=generator, dtype=exact).to(dtype)
    initial = torch.randn(2, 3, generator=generator, dtype=exact).to(compute_dtype(dtype))
    if transposed:
        gates, tokens = (t.mT.contiguous().mT for t in (gates, tokens))
    inputs = [t.requires_grad_() for t in (gates, tokens, initial)]
    whole = linear_scan(*inputs, reverse=reverse, return_final_state=True)
    parts = scan_in_chunks(*inputs, [0, 0, 1, 17, 33, 40, 40], reverse)
    of_outputs = [torch.randn(out.shape, dtype=out.dtype) for out in whole]
    grads = torch.autograd.grad(whole, inputs, of_outputs)
    grads_of_parts = torch.autograd.grad(parts, inputs, of_outputs)
    for out, part in zip((*whole, *grads), (*parts, *grads_of_parts), strict=True):
        assert out.dtype == part.dtype
        assert_close(out, wide(part), 16 * ROUNDING[dtype], largest(part))


def test_packed_sequences_are_scanned_apart() -> None:
    """What is in one sequence changes nothing in another."""
    cu_seqlens = torch.tensor([0, 4, 4, 5, 12], dtype=torch.int32)
    gates = torch.rand(12, 3, dtype=torch.float64)
    tokens = torch.randn(12, 3, dtype=torch.float64)
    initial = torch.randn(4, 3, dtype=torch.float64)
    run = partial(linear_scan, dim=0, cu_seqlens=cu_seqlens, return_final_state=True)
    states, last = run(gates, tokens, initial)
    gates[4:5], tokens[4:5], initial[2] = torch.nan, torch.inf, torch.nan
    others = [*range(4), *range(5, 12)]
    poisoned, poisoned_last = run(gates, tokens, initial)
    assert torch.equal(poisoned[others], states[others])
    assert torch.equal(poisoned_last[[0, 1, 3]], last[[0, 1, 3]])
    assert torch.equal(last[1], initial[1])
    assert poisoned[4].isnan().all()
