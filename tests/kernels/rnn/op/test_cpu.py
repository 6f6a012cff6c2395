"""The compiled code of ``rnn`` for the CPU, against the reference in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from watched import levels, using

from scan_registry import rnn
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.op import cpu as rnn_cpu
from scan_registry.kernels.rnn.op.arguments import Options
from scan_registry.kernels.rnn.problem import SIZES, Clips, Function
from scan_registry.ops import _cpu

#: How (B, T, …) lies in memory.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "batch first": torch.Tensor.contiguous,
    "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "gaps within a block": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "gaps between blocks": lambda x: torch.stack([x, x], 2)[:, :, 0],
}
CLIPS = [Clips(), Clips(forward=0.3, recurrent=0.1), Clips(forward=0.5, recurrent_cut=True)]


@dataclass(frozen=True)
class Case:
    """One network: what a failure prints."""

    function: Function
    batch: int = 3
    time: int = 6
    heads: int = 2
    dim: int = 20
    place: str = "batch first"
    initial: bool = True
    final: bool = True
    clips: Clips = CLIPS[0]
    resets: bool = False
    anew: bool = False
    bounds: tuple[int, ...] | None = None

    def make(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """inputs, recurrent, bias and initial, in float32."""
        torch.manual_seed(self.dim)
        sizes, unit = SIZES[self.function], (self.heads, self.dim)
        inputs = torch.randn(self.batch, self.time, sizes.inputs, *unit)
        recurrent = torch.randn(sizes.recurrent, *unit, self.dim) * self.dim**-0.5
        rows = self.batch if self.bounds is None else len(self.bounds) - 1
        initial = torch.randn(len(sizes.states), rows, *unit)
        if self.function == "slstm":
            initial[2] = initial[2].abs() + 1  # the normaliser is at least 1 after a step
        given = PLACES[self.place](inputs), recurrent, torch.randn(sizes.bias, *unit)
        return *given, initial if self.initial else None

    @property
    def reset(self) -> Tensor | None:
        """Also at a first step, and at steps one after the other."""
        if not self.resets:
            return None
        torch.manual_seed(1)
        reset = torch.rand(self.time, self.batch).T < 0.4
        reset[0, :2] = True
        return reset

    @property
    def fresh(self) -> Tensor | None:
        """What the states are where they are reset."""
        if not self.anew:
            return None
        made = replace(self, initial=True).make()[3]
        return None if made is None else made.flip(1, 3)

    @property
    def offsets(self) -> Tensor | None:
        return None if self.bounds is None else torch.tensor(self.bounds)

    def expected(
        self,
        inputs: Tensor,
        recurrent: Tensor,
        bias: Tensor,
        initial: Tensor | None,
        fresh: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """States and last ones, of one run of steps after the other, each by the reference."""
        bounds = [(0, self.time)] * self.batch
        if self.bounds is not None:
            bounds = [*zip(self.bounds, self.bounds[1:], strict=False)]
        rows, ends = [], []
        for row, (first, end) in enumerate(bounds):
            place = row if self.bounds is None else 0
            now = inputs.new_zeros(len(SIZES[self.function].states), 1, *inputs.shape[3:])
            if initial is not None:
                now = initial[:, row : row + 1]
            cuts = [] if self.reset is None else self.reset[place].nonzero().flatten().tolist()
            for begin, stop in zip(
                [first, *(t for t in cuts if first <= t < end)],
                [*(t for t in cuts if first <= t < end), end],
                strict=True,
            ):
                if begin in cuts:
                    now = torch.zeros_like(now)
                    if fresh is not None:
                        now = fresh[:, row : row + 1]
                if begin == stop:
                    continue
                steps = inputs[place : place + 1, begin:stop]
                made, _ = reference.forward(self.function, steps, recurrent, bias, now, self.clips)
                rows.append(made)
                now = made[:, :, -1]
            ends.append(now)
        states = torch.cat(rows, 2)
        return states.unflatten(2, (self.batch, -1)).squeeze(1), torch.cat(ends, 1)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest value."""
    if not expected.numel():
        return 0.0
    largest = expected.abs().max().clamp_min(1e-30)
    return ((found.double() - expected).abs().max() / largest).item()


FUNCTIONS: list[Function] = [*SIZES]
#: Products with R have tiles of 1 to 6 rows, whatever the function is.
ROWS: list[Case] = [
    *(Case(FUNCTIONS[k % 4], batch=k, heads=1, time=3, dim=33) for k in (2, 5, 6, 8, 11)),
    # A task has 48 rows at most.
    Case("gru", batch=50, heads=1, time=3, dim=64, initial=False, final=False),
    # Of a single step R is read if there is a state before it.
    Case("lstm", time=1),
    Case("slstm", time=1),
]
CASES = [
    *ROWS,
    *(Case(function, clips=clips) for function in FUNCTIONS for clips in CLIPS),
    *(
        case
        for function in FUNCTIONS
        for case in (
            *(Case(function, time=3, place=place) for place in [*PLACES][1:]),
            Case(function, batch=1, heads=1, time=3, dim=3),
            Case(function, time=1, initial=False),
            Case(function, resets=True, time=4),
            Case(function, resets=True, time=3, initial=False, final=False, batch=7),
            Case(function, resets=True, anew=True, time=3, initial=False),
            Case(function, resets=True, anew=True, time=1, dim=5),
            Case(function, batch=1, time=7, bounds=(0, 2, 2, 5, 6, 7)),
            Case(function, batch=1, time=7, bounds=(0, 1, 7), resets=True, initial=False),
            Case(function, batch=1, time=12, bounds=(0, 5, 12), resets=True, anew=True),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case) -> None:
    given = case.make()
    wide = [None if each is None else each.double() for each in (*given, case.fresh)]
    expected = case.expected(*wide)
    tensors, options = (*given, case.reset, case.fresh), Options(case.function, "auto", case.clips)
    for level in levels():
        with using(level):
            states, last, cache = rnn_cpu.forward(tensors, options, True, case.offsets)
        assert difference(states, expected[0]) < 2e-6, level
        assert difference(last, expected[1]) < 2e-6, level
        assert cache.dim() == 5 or case.function == "elman"


@pytest.mark.parametrize("case", [c for c in CASES if c.clips == Clips()], ids=str)
def test_backward(case: Case) -> None:
    """Against torch's derivatives of the loops of double precision."""
    given, options, resets = case.make(), Options(case.function), (case.reset, case.fresh)
    tensors = *given, case.fresh
    wide = [None if each is None else each.double().requires_grad_() for each in tensors]
    states, last = case.expected(*wide)
    sizes = SIZES[case.function]
    final = torch.randn(last.shape) if case.final else None
    wanted = [each for each in (wide[0], wide[2], wide[3], wide[4]) if each is not None]
    # Gradients of h alone, and of all states. The stabiliser of sLSTM, its last state, changes nothing but itself, c and n.
    for count in sorted({1, states.shape[0]}):
        grad = torch.randn(count, *states.shape[1:])
        loss = (states[:count] * grad).sum() + (0 if final is None else (last * final).sum())
        grads = torch.autograd.grad(loss, wanted, retain_graph=True)
        of_inputs, of_bias, *of_initial = grads
        if count == 1:
            grad = PLACES[case.place](grad[0])[None]
        for level in levels():
            with using(level):
                made, _, cache = rnn_cpu.forward((*given, *resets), options, True, case.offsets)
                known = given[1], made, given[3], cache, grad, final
                found = rnn_cpu.backward((*known, *resets), options, case.offsets)
            gates_grad = found[0]
            of_states = found[1 if case.initial else 2 :]
            of_gates = gates_grad[:, :, sizes.bias - sizes.inputs :]
            assert difference(of_gates, of_inputs) < 1e-5, (count, level)
            assert difference(gates_grad.sum((0, 1)), of_bias) < 1e-5, (count, level)
            for one, expected in zip(of_states, of_initial, strict=True):
                assert difference(one, expected) < 1e-5, (count, level)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("case", [c for c in CASES if c.clips != Clips()], ids=str)
def test_backward_with_clips(case: Case, level: str) -> None:
    """Against the reference, which says what these gradients are."""
    given, options = case.make(), Options(case.function, "auto", case.clips)
    with using(level):
        states, _, cache = rnn_cpu.forward(given, options, True)
        grad, final = torch.randn_like(states), torch.randn_like(states[:, :, 0])
        found = rnn_cpu.backward((given[1], states, given[3], cache, grad, final), options)
    kept = cache if cache.dim() == 5 else states[0].unsqueeze(2)[:, :, :0]
    tensors = given[1], states, given[3], kept, grad, final
    wide = [None if each is None else each.double() for each in tensors]
    expected = reference.backward(case.function, *wide, case.clips)
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) < 1e-5


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_far_from_zero(function: Function) -> None:
    """Where exponents overflow unless that is provided for."""
    inputs = torch.tensor([-300.0, -90, -20, -1e-4, 1e-4, 20, 90, 300])
    sizes = SIZES[function]
    x = inputs.expand(sizes.inputs, 8, 8)
    # Each gate takes the values in another order.
    x = torch.stack([x[k].roll(3 * k, -1).roll(k) for k in range(sizes.inputs)]).permute(1, 0, 2)
    x = x.reshape(1, 8, sizes.inputs, 1, 8).contiguous()
    recurrent, bias = torch.zeros(sizes.recurrent, 1, 8, 8), torch.zeros(sizes.bias, 1, 8)
    expected, _ = reference.forward(function, x.double(), recurrent.double(), bias.double())
    for level in levels():
        with using(level):
            found = rnn_cpu.forward((x, recurrent, bias, None), Options(function), False)[0]
        # sLSTM has exponents of hundreds, whose last digit in float32 is 3e-5.
        torch.testing.assert_close(found.double(), expected, rtol=5e-5, atol=1e-7)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(function: Function, dtype: torch.dtype) -> None:
    """States are rounded where they are written, and not where they are carried."""
    given = [None if t is None else t.to(dtype) for t in Case(function, time=20).make()]
    found = rnn_cpu.forward(given, Options(function), False)[0]
    expected, _ = reference.forward(function, *(None if t is None else t.double() for t in given))
    assert found.dtype == dtype
    assert difference(found, expected.to(dtype).double()) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_operator_takes_it(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("forward", "backward"):
        kernel = getattr(_cpu, f"rnn_{name}")

        def watched(*args: Any, name: str = name, kernel: Any = kernel) -> None:
            called.append(name)
            kernel(*args)

        monkeypatch.setattr(_cpu, f"rnn_{name}", watched)
    inputs, recurrent, bias, initial = Case(function).make()
    assert initial is not None
    tensors = [each.requires_grad_() for each in (inputs, recurrent, bias, initial.unsqueeze(2))]
    found = rnn(*tensors, function=function)[0]
    grads = torch.autograd.grad(found[0].sum(), tensors)
    assert called == ["forward", "backward"]
    wide = [each.detach().double().requires_grad_() for each in tensors]
    expected = rnn(*wide, function=function, backend="reference")[0]
    assert difference(found, expected) < 2e-6
    for one, other in zip(grads, torch.autograd.grad(expected[0].sum(), wide), strict=True):
        assert difference(one, other) < 1e-5


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("batch", "heads"), [(100, 1), (1, 3), (2, 2)])
def test_threads_share_rows_and_heads(function: Function, batch: int, heads: int) -> None:
    """So many elements that they are worth some threads; with one, rows go in tasks, too."""
    case = Case(function, batch=batch, heads=heads, time=200 // batch + 20, dim=128, resets=True)
    given, options, found = case.make(), Options(function), []
    usual = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            made = rnn_cpu.forward((*given, case.reset), options, True)
            tensors = given[1], made[0], given[3], made[2], made[0], made[1], case.reset
            found.append((*made, *rnn_cpu.backward(tensors, options)))
        finally:
            torch.set_num_threads(usual)
    for one, other in zip(*found, strict=True):
        assert difference(one, other.double()) < 1e-5


FORWARD = ("lstm", (1024,) * 10, (2, 3, 1, 4, *[0] * 12), 1.0, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({0: "rnn"}, "cell 'rnn'; accepted are lstm, gru, elman, slstm"),
        ({1: (1024,) * 7}, "takes 10 pointers, got 7"),
        ({1: (None,) * 10}, "a pointer of rnn_forward is null"),
        ({2: (2, 3, 1, 4)}, "takes 16 scalars, got 4"),
        ({2: (2, -3, 1, 4, *[0] * 12)}, "size 1 is -3"),
        ({2: (2, 3, 1, 4, 2, *[0] * 11)}, "sequences are packed, and batch is 2"),
        ({4: 0}, "threads is 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[int, Any], words: str) -> None:
    arguments = list(FORWARD)
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=words):
        _cpu.rnn_forward(*arguments)


def test_offsets_must_rise() -> None:
    x, offsets = torch.zeros(1, 4, 4), torch.tensor([0, 3, 2])
    pointers = (*[x.data_ptr()] * 6, offsets.data_ptr(), *[x.data_ptr()] * 3)
    with pytest.raises(ValueError, match="offsets do not rise from 0 to time, 4"):
        _cpu.rnn_forward("lstm", pointers, (1, 4, 1, 1, 2, *[0] * 11), 1.0, 1)
