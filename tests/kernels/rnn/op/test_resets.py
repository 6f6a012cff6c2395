"""``rnn`` with states that start anew, and with sequences packed along time, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from recurring import draw, error, gradients, plainly
from torch import Tensor

from scan_registry import explain, rnn
from scan_registry.kernels.rnn.op import resets as rnn_resets
from scan_registry.kernels.rnn.op import segments as rnn_segments
from scan_registry.kernels.rnn.op.arguments import FUNCTIONS
from scan_registry.kernels.rnn.problem import Function

BOUNDS = torch.tensor([0, 0, 4, 5, 5, 12, 13, 13])  # of T = 13; three are empty


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    return


@pytest.fixture(params=["within rows", "cut"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Resets as the reference takes them, and cut into rows, as for a GPU."""
    monkeypatch.setattr(
        rnn_resets,
        "cuts_at_resets",
        lambda given, _: request.param == "cut" and given.reset is not None,
    )
    return str(request.param)


def some(batch: int, time: int, often: float = 0.3) -> Tensor:
    """Resets here and there, at a first and a last step, too."""
    reset = torch.rand(batch, time) < often
    reset[0, 0] = reset[-1, -1] = True
    return reset


def alike(found: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < tolerance


def one_by_one(
    function: Function, inputs: Any, bounds: Tensor, **resets: Any
) -> tuple[Tensor, Tensor]:
    """Each packed sequence by itself, in the formulas."""
    wx, r, b, states = inputs
    parts, ends = [], []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        start = states[:, :, number : number + 1]
        if begin == end:
            ends.append(start)
            continue
        own = {
            name: value[:, begin:end] if name == "reset" else value[:, :, number : number + 1]
            for name, value in resets.items()
        }
        parts.append(plainly(function, wx[:, begin:end], r, b, start, **own))
        ends.append(parts[-1][:, :, -1:])
    return torch.cat(parts, 2), torch.cat(ends, 2)


# --- What it computes -------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_resets(function: Function, given: bool, way: str) -> None:
    inputs, reset = draw(function, (3, 9, 2, 4)), some(3, 9)
    how = {"reset": reset}
    if given:
        how["reset_states"] = (torch.rand_like(inputs[3]) * 2).requires_grad_()
    states, last = rnn(*inputs, **how, function=function)
    expected = plainly(function, *inputs, **how)
    assert error(states, expected) < 1e-13
    assert torch.equal(last, states[:, :, -1:])
    leaves = [*inputs, *([how["reset_states"]] if given else [])]
    alike(gradients((states, last), leaves), gradients((expected, expected[:, :, -1:]), leaves))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_was_before_counts_for_nothing(function: Function, way: str) -> None:
    """Neither NaN nor a gradient crosses a reset, and another row sees nothing of it."""
    wx, r, b, start = draw(function, (2, 6, 1, 3))
    reset = torch.zeros(2, 6, dtype=torch.bool)
    reset[0, 3] = True
    spoilt = wx.detach().clone()
    spoilt[0, 2] = math.nan
    spoilt.requires_grad_()
    results = []
    for x in (wx, spoilt):
        states, _ = rnn(x, r, b, start, reset=reset, function=function)
        seen = states[:, 0, 3:], states[:, 1]
        loss = sum(
            (each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in seen
        )
        (grad,) = torch.autograd.grad(loss, x)
        results.append([*seen, grad[0, 3:], grad[1]])
        if x is wx:
            assert not grad[0, :3].any()
            assert grad[1, 0].any()
    assert all(torch.equal(clean, after) for clean, after in zip(*results, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_sequence_in_pieces(function: Function, way: str) -> None:
    """States handed on from piece to piece, each of any length, give what the whole gives."""
    inputs, reset = [t.detach() for t in draw(function, (2, 17, 1, 3))], some(2, 17)
    wx, r, b, start = inputs
    anew = torch.rand_like(start)
    whole, end = rnn(wx, r, b, start, reset=reset, reset_states=anew, function=function)
    cuts = [0, *sorted(torch.randperm(16)[:4].add(1).tolist()), 17]
    pieces = []
    for begin, stop in pairwise(cuts):
        part = slice(begin, stop)
        states, start = rnn(
            wx[:, part], r, b, start, reset=reset[:, part], reset_states=anew, function=function
        )
        pieces.append(states)
    alike([torch.cat(pieces, 2), start], [whole, end])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_packed_sequences(function: Function, known: bool) -> None:
    """With the length of the longest, they are one batch; without, in batches of similar lengths."""
    wx, r, b, _ = draw(function, (2, 13, 2, 3))
    states = torch.rand(*_states(function, wx, 7)).double().mul(3).requires_grad_()
    inputs = wx, r, b, states
    # Where the values can be read, the length is a check: not under FakeTensor and on GPUs.
    layout = rnn_segments.layout_of
    if known:
        rnn_segments.layout_of = lambda x, reset, given, cut: rnn_segments._layout_of_length(  # type: ignore[assignment]
            x, reset, given.cu_seqlens, 8
        )
    try:
        found = rnn(*inputs, cu_seqlens=BOUNDS, function=function)
    finally:
        rnn_segments.layout_of = layout
    expected = one_by_one(function, inputs, BOUNDS)
    alike(found, expected, 1e-13)
    alike(gradients(found, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("bounds", [BOUNDS, BOUNDS.int()], ids=["int64", "int32"])
@pytest.mark.parametrize("given", [False, True])
def test_packed_sequences_with_resets(given: bool, bounds: Tensor, way: str) -> None:
    wx, r, b, _ = draw("lstm", (2, 13, 2, 3))
    states, anew = (torch.rand(*_states("lstm", wx, 7)).double().requires_grad_() for _ in "ab")
    how: dict[str, Tensor] = {"reset": some(2, 13)}
    if given:
        how["reset_states"] = anew
    inputs = wx, r, b, states
    leaves = [*inputs, *([anew] if given else [])]
    found = rnn(*inputs, **how, cu_seqlens=bounds, max_seqlen=9)
    expected = one_by_one("lstm", inputs, bounds, **how)
    alike(found, expected, 1e-13)
    alike(gradients(found, leaves), gradients(expected, leaves))


def test_packed_sequences_from_zeros() -> None:
    wx, r, b, _ = draw("gru", (1, 13, 2, 3))
    found = rnn(wx, r, b, function="gru", cu_seqlens=BOUNDS)
    zeros = torch.zeros(*_states("gru", wx, 7), dtype=torch.float64)
    alike(found, one_by_one("gru", (wx, r, b, zeros), BOUNDS))


def _states(function: Function, wx: Tensor, sequences: int) -> tuple[int, ...]:
    count = {"lstm": 2, "gru": 1, "elman": 1, "slstm": 4}[function]
    return count, wx.shape[0], sequences, *wx.shape[3:]


@pytest.mark.parametrize("lengths", [[5], [1] * 50, [64] + [1] * 30, [*range(1, 40)], [3, 2, 1000]])
def test_less_than_half_is_padding(lengths: list[int]) -> None:
    rows = [
        torch.tensor(lengths)[chosen] for chosen in rnn_segments._buckets(torch.tensor(lengths))
    ]
    assert sorted(torch.cat(rows).tolist()) == sorted(lengths)
    assert sum(len(each) * int(each.max()) for each in rows) <= 2 * sum(lengths)
    assert len(rows) <= max(lengths).bit_length()


@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (3, 0, 2, 4), (3, 5, 0, 4)])
def test_nothing_to_do(shape: Any, way: str) -> None:
    inputs = draw("lstm", shape)
    anew = torch.rand_like(inputs[3]).requires_grad_()
    how = {"reset": torch.ones(shape[:2], dtype=torch.bool), "reset_states": anew}
    states, last = rnn(*inputs, **how)
    assert states.shape == (2, *shape[:2], *shape[2:])
    if not shape[1]:
        assert torch.equal(last, inputs[3])
    assert not torch.autograd.grad(states.sum(), anew)[0].any()
    bounds = torch.tensor([0, 0, shape[1]])
    states = torch.rand(*_states("lstm", inputs[0], 2)).double()
    every, ends = rnn(*inputs[:3], states, cu_seqlens=bounds)
    assert every.shape == (2, *shape[:2], *shape[2:])
    assert torch.equal(ends[:, :, 0], states[:, :, 0])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (3, 0, 2, 4), (0, 0, 2, 4)])
def test_nothing_to_do_of_packed_sequences(shape: Any, known: bool, way: str) -> None:
    """There are states after each sequence, and every gradient has its tensor's shape."""
    wx, r, b, _ = draw("lstm", shape)
    drawn = torch.rand(2, *_states("lstm", wx, 2), dtype=torch.float64)
    start, anew = (each.clone().requires_grad_() for each in drawn)
    how: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 0, shape[1]])}
    how |= {"max_seqlen": shape[1]} if known else {}
    how["reset"] = torch.ones(shape[:2], dtype=torch.bool)
    for states in (None, start):
        every, ends = rnn(wx, r, b, states, **how, reset_states=anew)
        assert every.shape == (2, *shape[:2], *shape[2:])
        assert torch.equal(ends, torch.zeros_like(start) if states is None else start)
        leaves = [wx, r, start, anew]
        (every.sum() + ends.sum()).backward(inputs=leaves)
        assert all(t.grad is None or t.grad.shape == t.shape for t in leaves)
        assert anew.grad is not None
        assert not anew.grad.any()
    assert start.grad is not None
    assert (start.grad == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_narrow_dtypes(function: Function, dtype: torch.dtype) -> None:
    inputs, reset = draw(function, (2, 12, 1, 8), dtype), some(2, 12)
    inputs = (*((t.detach() / 2).requires_grad_() for t in inputs[:3]), inputs[3])
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    states, _ = rnn(*inputs, reset=reset, function=function)
    expected = plainly(function, *wide, reset=reset)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert states.dtype == dtype
    alike([states.double()], [expected], tolerance)
    found = gradients([states.double()], inputs)
    alike([grad.double() for grad in found], gradients([expected], wide), tolerance)


def test_clips_and_cuts_go_with_resets() -> None:
    """A sequence with a reset is what two are."""
    wx, r, b, start = draw("lstm", (1, 8, 1, 3))
    reset = torch.arange(8).eq(5).unsqueeze(0)
    how: dict[str, Any] = {"forward_clipval": 0.2, "gradient_recurrent_clipval": 0.01}
    one = rnn(wx, r, b, start, reset=reset, **how)[0]
    both = [rnn(wx[:, :5], r, b, start, **how)[0], rnn(wx[:, 5:], r, b, **how)[0]]
    two = torch.cat(both, 2)
    assert torch.equal(one, two)
    alike(gradients([one], (wx, r, b, start)), gradients([two], (wx, r, b, start)))


# --- Derivatives and transforms ---------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_second_derivatives(function: Function) -> None:
    wx, r, b, start = draw(function, (2, 4, 1, 2))
    anew = (torch.rand_like(start) + 1).requires_grad_()
    leaves, reset = (wx, r, b, start, anew), some(2, 4)
    how = {"reset": reset, "function": function}
    second = []
    for made in (
        rnn(wx, r, b, start, reset_states=anew, **how)[0],
        plainly(function, wx, r, b, start, reset, anew),
    ):
        first = torch.autograd.grad(made.square().sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    alike(*second, 1e-10)


@pytest.mark.parametrize("function", ["gru", "slstm"])
def test_transforms(function: Function) -> None:
    wx, r, b, start = (t.detach() for t in draw(function))
    reset = some(3, 5)

    def loss(x: Tensor, anew: Tensor) -> Tensor:
        states, _ = rnn(x, r, b, start, reset=reset, reset_states=anew, function=function)
        return states.square().sum()

    leaves = tuple((t.clone() + 1).requires_grad_() for t in (wx, start))
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    plain = tuple(leaf.detach() for leaf in leaves)
    alike(torch.func.grad(loss, argnums=(0, 1))(*plain), wanted)
    tangents = tuple(torch.randn_like(leaf) for leaf in plain)
    _, dot = torch.func.jvp(loss, plain, tangents)
    along = sum((g * t).sum() for g, t in zip(wanted, tangents, strict=True))
    torch.testing.assert_close(dot, along)

    many = torch.stack([reset, ~reset])
    mapped = torch.func.vmap(lambda marks: rnn(wx, r, b, reset=marks, function=function)[0])(many)
    for each, marks in zip(mapped, many, strict=True):
        torch.testing.assert_close(each, rnn(wx, r, b, reset=marks, function=function)[0])
    packed = torch.func.vmap(
        lambda x: rnn(x, r, b, function=function, cu_seqlens=torch.tensor([0, 2, 5]))[0]
    )(torch.stack([wx, 2 * wx]))
    alone = rnn(2 * wx, r, b, function=function, cu_seqlens=torch.tensor([0, 2, 5]))[0]
    torch.testing.assert_close(packed[1], alone)


def test_batches_of_gradients() -> None:
    wx, r, b, start = draw("gru")
    states, _ = rnn(wx, r, b, start, reset=some(3, 5), reset_states=start, function="gru")
    grads = torch.randn(3, *states.shape, dtype=states.dtype)
    together = torch.autograd.grad(
        states, (wx, start), grads, is_grads_batched=True, retain_graph=True
    )
    for number, grad in enumerate(grads):
        alone = torch.autograd.grad(states, (wx, start), grad, retain_graph=True)
        for all_of_them, one in zip(together, alone, strict=True):
            torch.testing.assert_close(all_of_them[number], one)


# --- torch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
def test_compile_without_a_break(given: bool) -> None:
    wx, r, b, start = draw("gru", dtype=torch.float32)
    reset = some(3, 5)

    def resets(*tensors: Tensor) -> Any:
        anew = tensors[3] if given else None
        return rnn(*tensors, reset=reset, reset_states=anew, function="gru")

    bounds = torch.tensor([0, 2, 5])
    of_two = torch.rand(1, 3, 2, *wx.shape[3:]).requires_grad_()

    def packed(*tensors: Tensor) -> Any:
        return rnn(*tensors, cu_seqlens=bounds, max_seqlen=4, function="gru")

    for call, inputs in ((resets, (wx, r, b, start)), (packed, (wx, r, b, of_two))):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        expected, found = call(*inputs), compiled(*inputs)
        torch.testing.assert_close(found, expected)
        for got, want in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
            torch.testing.assert_close(got, want)


def test_compiled_code_that_reads_bounds() -> None:
    wx, r, b, _ = draw("gru", dtype=torch.float32, grad=False)

    def call(bounds: Tensor) -> Any:
        return rnn(wx, r, b, cu_seqlens=bounds, function="gru")[0] * 2

    bounds = torch.tensor([0, 2, 5])
    torch.testing.assert_close(torch.compile(call, backend="eager")(bounds), call(bounds))


@pytest.mark.parametrize("given", [False, True])
def test_opcheck(given: bool) -> None:
    wx, r, b, states = (t.detach() for t in draw("gru", (2, 3, 2, 4)))
    start = states.squeeze(2)
    anew = start + 1 if given else None
    how = "gru", "auto", math.inf, math.inf, False
    tensors = wx, r, b, start, some(2, 3), anew
    op, backward = (
        getattr(torch.ops.scan_registry, name).default for name in ("rnn", "rnn_backward")
    )
    every, last, cache = op(*tensors, *how, True)
    back = r, every, start, some(2, 3), anew, cache, torch.randn_like(every), torch.randn_like(last)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for one, args in ((op, (*tensors, *how, True)), (backward, (*back, *how))):
        torch.library.opcheck(one, args, test_utils=tests)
    with pytest.raises(ValueError, match="the operator's reset has shape"):
        op(*tensors[:4], some(3, 2), None, *how, True)


def test_explain_of_rows() -> None:
    """Of packed sequences, and of pieces between resets to given states, it names the batch of the longest."""
    wx, r, b, _ = draw("gru", (1, 13, 1, 16), torch.float32, grad=False)
    reset = torch.zeros(1, 13, dtype=torch.bool)
    reset[0, 5] = True
    for given, size in (
        ({"cu_seqlens": BOUNDS}, (2, 7)),
        ({"cu_seqlens": BOUNDS, "max_seqlen": 7}, (7, 7)),
        ({"reset": reset}, (1, 13)),
        ({"reset": reset, "reset_states": torch.zeros(1, 1, 1, 1, 16)}, (2, 8)),
    ):
        call = explain(rnn, wx, r, b, **given, function="gru")
        problem = call.steps[0].decision.problem
        assert (problem.batch, problem.time) == size


# --- What it refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error_type", "words"),
    [
        ({"reset": [True]}, TypeError, "reset must be a torch.Tensor, not list"),
        (
            {"reset": torch.zeros(3, 5)},
            TypeError,
            "reset has dtype torch.float32; accepted is bool",
        ),
        (
            {"reset": torch.zeros(5, 3).bool()},
            ValueError,
            r"reset has shape \(5, 3\); it must be \(3, 5\)",
        ),
        ({"reset_states": torch.zeros(2, 3, 1, 2, 4)}, ValueError, "given without reset"),
        (
            {"reset": torch.zeros(3, 5).bool(), "reset_states": torch.zeros(2, 3, 2, 4)},
            ValueError,
            r"reset_states has shape \(2, 3, 2, 4\).* must be \(2, 3, 1, 2, 4\)",
        ),
        ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens must be a torch.Tensor, not list"),
        ({"cu_seqlens": torch.tensor([0.0, 5])}, TypeError, "accepted are int32 and int64"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "it must rise from 0 to the 5 steps"),
        (
            {"cu_seqlens": torch.tensor([0, 2, 5]), "states": torch.zeros(2, 3, 1, 2, 4)},
            ValueError,
            r"with 2 packed sequences it must be \(2, 3, 2, 2, 4\)",
        ),
        ({"max_seqlen": 5}, ValueError, "max_seqlen is given without cu_seqlens"),
        (
            {"cu_seqlens": torch.tensor([0, 2, 5]), "max_seqlen": 2},
            ValueError,
            "max_seqlen is 2, and the longest sequence in cu_seqlens has 3 steps",
        ),
        ({"cu_seqlens": torch.tensor([0, 5]), "max_seqlen": 2.5}, TypeError, "must be an int"),
        ({"cu_seqlens": torch.tensor([0, 5]), "max_seqlen": True}, TypeError, "must be an int"),
    ],
)
def test_errors(changes: dict[str, Any], error_type: type[Exception], words: str) -> None:
    wx, r, b, _ = draw("lstm", grad=False, dtype=torch.float32)
    with pytest.raises(error_type, match=words):
        rnn(wx, r, b, **changes)
