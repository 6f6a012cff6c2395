"""How exact ``gated_scan`` is: rounding by dtype, extremes, and states that are not finite before a reset."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gating import FORMULAS, drawn, loop, value_input
from torch import Tensor

from scan_registry import gated_scan, hgrn, linear_scan, min_gru, min_lstm, rg_lru
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.gated_scan.functions import sigmoids
from scan_registry.kernels.gated_scan.kinds import KINDS, RG_LRU_SCALE

#: What no float32 may come out other than finite of.
EXTREMES = (0.0, -0.0, 1e-40, -1e-40, 0.5, -3.0, 17.0, -17.0, 50.0, -50.0, 104.0, -104.0, 1e4, -1e4)


def test_long_memory() -> None:
    """Of gates within 1e-6 of 1. What they are rounded by adds up; but that their complements were differences would
    cost a tenth."""
    steps = 2000
    far = torch.full((1, 1, steps), -14.5)
    x = torch.linspace(-1, 1, steps).view(1, 1, steps)
    for kind, tensors in {
        "min_gru_identity": (far, x),
        "min_lstm_identity": (-far, far, x),
        "hgrn": (x, -far, torch.zeros(1)),
        "rg_lru": (x, x + 1, x, torch.tensor([-16.0])),
    }.items():
        leaves = [t.clone().requires_grad_() for t in tensors]
        found, expected = gated_scan(kind, *leaves), loop(kind, *leaves)[0]
        assert relative_error(found, expected.detach()) < 1e-4
        grads, exact = (torch.autograd.grad(o.sum(), leaves) for o in (found, expected))
        for place, (one, other) in enumerate(zip(grads, exact, strict=True)):
            assert relative_error(one, other.double()) < 2e-4, (kind, place)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_extremes_are_finite(kind: str, reset: bool) -> None:
    """Every pair of them, in float32: values, gradients and second derivatives."""
    values = torch.tensor(EXTREMES)
    count, parameters, _ = FORMULAS[kind]
    rows = torch.cartesian_prod(*[values] * 2)
    sequences = [rows[:, 0], rows[:, 1], rows[:, 0].flip(0)][:count]
    # Each pair is a channel of one step, and of three, between others.
    for steps in (1, 3):
        tensors = [x.view(1, -1, 1).repeat(1, 1, steps) for x in sequences]
        if kind == "linear":
            tensors[0] = tensors[0].clamp(-1, 1)
        tensors += [
            rows[:, 1].flip(0).clamp(0, 1) if kind == "hgrn" else rows[:, 1].flip(0).clone()
        ] * parameters
        leaves = [t.requires_grad_() for t in tensors]
        restarts = torch.ones(1, steps, dtype=torch.bool) if reset else None
        states = gated_scan(kind, *leaves, reset=restarts)
        assert states.isfinite().all()
        first = torch.autograd.grad(states.sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.sum() for g in first), leaves, materialize_grads=True)
        for grad in (*first, *second):
            assert grad.isfinite().all()
        expected = loop(kind, *(t.detach() for t in leaves), reset=restarts)[0]
        known = expected.isfinite()  # the loop divides zero by zero
        assert known.sum() > 0.9 * known.numel()
        torch.testing.assert_close(states.double()[known], expected[known], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(50.0, -50.0), (1e4, -1e4)], ids=str)
def test_gates_that_are_open_or_closed(sizes: tuple[float, float]) -> None:
    opened, closed = (torch.full((1, 1, 4), size) for size in sizes)
    x = torch.tensor([3.0, -2.0, 0.5, 1.0]).view(1, 1, 4)
    zeros = torch.zeros(1, 1, 4)
    identity: Any = {"activation": "identity"}
    before = torch.full((1, 1), 7.0)
    torch.testing.assert_close(min_gru(opened, x, **identity), x)
    torch.testing.assert_close(
        min_gru(closed, x, initial_state=before, **identity), zeros + 7, rtol=1e-6, atol=0
    )
    # Both gates closed: what counts is their ratio.
    for both in (opened, closed):
        halves = min_lstm(both, both, x, **identity)
        torch.testing.assert_close(halves, linear_scan(zeros + 0.5, x / 2))
    torch.testing.assert_close(min_lstm(closed, opened, x, **identity), x)
    torch.testing.assert_close(hgrn(x, closed), torch.nn.functional.silu(x))
    torch.testing.assert_close(hgrn(x, opened), zeros, rtol=0, atol=1e-20)
    # A gate of 1 forgets nothing, and takes nothing in; one of 0 takes all.
    for a_param, expected in ((-120.0, zeros), (1e4, x)):
        found = rg_lru(x, zeros, opened, torch.tensor([a_param]))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-20)


def test_both_sigmoids_and_their_derivatives_have_all_digits() -> None:
    """Where one is near 1, its derivative is not that of a number rounded to 1."""
    x = torch.linspace(-80, 80, 321, requires_grad=True)
    wide = x.detach().double()
    for number, made in enumerate(sigmoids(x)):
        sign = 1 - 2 * number
        value = 1 / (1 + (-sign * wide).exp())
        slope = sign / (2 + wide.exp() + (-wide).exp())
        torch.testing.assert_close(made.double(), value, rtol=3e-7, atol=0)
        (grad,) = torch.autograd.grad(made.sum(), x, retain_graph=True)
        torch.testing.assert_close(grad.double(), slope, rtol=5e-7, atol=0)
        under = torch.func.grad(lambda x, number=number: sigmoids(x)[number].sum())(x.detach())
        torch.testing.assert_close(under.double(), slope, rtol=5e-7, atol=0)


# --- The root of RG-LRU -----------------------------------------------------------------------


def test_the_roots_derivative_is_capped() -> None:
    """At 1000, as in the implementations that models were trained with; the value is not."""
    a_param = torch.tensor([-30.0, -18.0, -14.0, -12.0, 0.0], dtype=torch.float64)
    x = torch.ones(1, 5, 1, dtype=torch.float64)
    gate = torch.full_like(x, 40.0)
    leaf = a_param.clone().requires_grad_()
    states = rg_lru(x, gate, gate, leaf)
    (grad,) = torch.autograd.grad(states.sum(), leaf)
    for found, slope, parameter in zip(states[0, :, 0].tolist(), grad.tolist(), a_param.tolist(), strict=True):  # fmt: skip
        log_gate = -RG_LRU_SCALE * math.log1p(math.exp(parameter))
        square = -math.expm1(2 * log_gate)
        assert found == pytest.approx(math.sqrt(square), rel=1e-12)
        of_square = min(1000.0, 0.5 / math.sqrt(square))
        of_parameter = 2 * RG_LRU_SCALE * math.exp(2 * log_gate) / (1 + math.exp(-parameter))
        assert slope == pytest.approx(of_square * of_parameter, rel=1e-10)
    assert 0.5 / math.sqrt(-math.expm1(-2 * RG_LRU_SCALE * math.exp(-18.0))) > 1000  # or nothing is


def test_a_gate_of_one() -> None:
    """Where the root is of zero."""
    x = torch.randn(1, 1, 3, requires_grad=True)
    a_param = torch.full((1,), -200.0, requires_grad=True)
    states = rg_lru(x, x, x, a_param)
    assert not states.any()
    for grad in torch.autograd.grad(states.sum(), (x, a_param)):
        assert not grad.any()


# --- Resets -----------------------------------------------------------------------------------


def test_all_steps_reset() -> None:
    x, gate = torch.randn(2, 2, 3, 6)
    every = torch.ones(2, 6, dtype=torch.bool)
    initial = torch.full((2, 3), torch.inf)
    found, last = min_gru(gate, x, reset=every, initial_state=initial, return_final_state=True)
    expected = min_gru(gate.mT.reshape(-1, 3, 1), x.mT.reshape(-1, 3, 1)).view(2, 6, 3).mT
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(last, found[..., -1])
    torch.testing.assert_close(rg_lru(x, gate, gate, torch.rand(3), every), gate.sigmoid() * x)


@pytest.mark.parametrize(
    ("bad", "dtype"), [(torch.nan, torch.bfloat16), (torch.inf, torch.float32)], ids=str
)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_does_not_pass_a_reset(
    kind: str, dim: int, reverse: bool, bad: float, dtype: torch.dtype
) -> None:
    """Neither forwards nor, of gradients, backwards; in this sequence or that of the next batch."""
    call = drawn(kind, (2, 3, 8), dtype, dim=dim)
    reset = torch.zeros(2, 8, dtype=torch.bool)
    reset[:, 4] = True
    spoilt_time = 6 if reverse else 2
    tensors = [t.detach().clone() for t in call.tensors]
    time_first = 1 if dim == 1 else 2

    def at(x: Tensor, time: int) -> Tensor:
        return x.select(time_first, time)

    # The input that makes the token, for one batch.
    at(tensors[value_input(kind)], spoilt_time)[0] = bad
    leaves = [t.requires_grad_() for t in tensors]
    options: Any = {"reset": reset, "dim": dim, "reverse": reverse}
    found = gated_scan(kind, *leaves, **options)
    clean = gated_scan(kind, *(t.detach() for t in call.tensors), **options)
    after = range(5) if reverse else range(4, 8)
    for time in range(8):
        assert at(found, time)[1].isfinite().all()
        if time in after:
            torch.testing.assert_close(at(found, time), at(clean, time))
    assert not at(found, spoilt_time)[0].isfinite().any()
    # A gradient that is not finite, after the reset, stays there.
    weights = torch.ones_like(found)
    at(weights, 2 if reverse else 6)[1] = bad
    grads = torch.autograd.grad(found, leaves, weights)
    for grad in grads[: FORMULAS[kind][0]]:
        before = range(5, 8) if reverse else range(4)
        for time in before:
            assert at(grad, time)[1].isfinite().all()
        for time in after:
            assert at(grad, time)[0].isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_an_initial_state_that_is_not_finite(reverse: bool, packed: bool) -> None:
    """Nor is it, nor its gradient, if the first step is a reset."""
    x = torch.randn(2, 3, 6, requires_grad=True)
    bounds = torch.tensor([0, 3, 6]) if packed else None
    initial = torch.full((2, 3, 2) if packed else (2, 3), torch.nan, requires_grad=True)
    firsts = [5, 2] if reverse else [0, 3]
    reset = torch.zeros(2, 6, dtype=torch.bool)
    reset[:, firsts] = True
    options: Any = {"reset": reset, "reverse": reverse, "cu_seqlens": bounds}
    found = min_gru(x, x, initial_state=initial, **options)
    torch.testing.assert_close(found, min_gru(x, x, **options))
    of_x, of_initial = torch.autograd.grad(found.sum(), (x, initial))
    assert of_x.isfinite().all()
    assert not of_initial.any()


def test_gates_that_are_not_finite_do_not_count_at_a_reset() -> None:
    gates, tokens = torch.rand(1, 2, 4), torch.randn(1, 2, 4)
    reset = torch.tensor([[False, False, True, False]])
    expected = linear_scan(gates, tokens, reset=reset)
    for bad in (torch.nan, torch.inf):
        gates[..., 2] = bad
        leaf = gates.clone().requires_grad_()
        found = linear_scan(leaf, tokens, reset=reset)
        torch.testing.assert_close(found, expected)
        (grad,) = torch.autograd.grad(found.sum(), leaf)
        assert not grad[..., 2].any()
        assert grad.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_recurrence_gate_does_not_count_at_a_reset(bad: float) -> None:
    leaves = [*torch.randn(3, 1, 2, 4), torch.rand(2)]
    reset = torch.tensor([[False, False, True, False]])

    def both() -> tuple[Tensor, tuple[Tensor, ...]]:
        given = [t.clone().requires_grad_() for t in leaves]
        states = rg_lru(*given, reset=reset)
        return states, torch.autograd.grad(states.sum(), given)

    expected = both()
    leaves[1][..., 2] = bad
    torch.testing.assert_close(both(), expected)
    assert not expected[1][1][..., 2].any()
