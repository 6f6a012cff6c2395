"""``linear_scan`` on the CPU: dtypes that mix, and tensors without elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from precision import ROUNDING, compute_dtype, wide
from torch import Tensor

from scan_registry import linear_scan

Oracle = Callable[..., tuple[Tensor, Tensor]]


def assert_close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative to the largest value, or to one."""
    error = float((wide(out.detach()) - expected.detach()).abs().max())
    assert error <= tolerance * max(1.0, float(expected.detach().abs().max()))


# --- Dtypes -----------------------------------------------------------------------------------

#: The dtype of the states, by that of gates (rows) and of tokens (columns); "–" is refused.
RESULTS = """
            float32    bfloat16   float16    float64    complex64  complex128
float32     float32    bfloat16   float16    –          complex64  –
bfloat16    float32    bfloat16   float16    –          complex64  –
float16     float32    bfloat16   float16    –          complex64  –
float64     –          –          –          float64    –          complex128
complex64   complex64  complex64  complex64  –          complex64  –
complex128  –          –          –          complex128 –          complex128
"""
_COLUMNS, *_ROWS = (line.split() for line in RESULTS.strip().splitlines())
MIXES = [
    (row[0], tokens, states)
    for row in _ROWS
    for tokens, states in zip(_COLUMNS, row[1:], strict=True)
]


@pytest.mark.parametrize(("gates_name", "tokens_name", "states_name"), MIXES)
def test_dtypes_that_mix(
    plainly: Oracle, gates_name: str, tokens_name: str, states_name: str
) -> None:
    gates_dtype, tokens_dtype = getattr(torch, gates_name), getattr(torch, tokens_name)
    gates = torch.rand(2, 9, dtype=torch.float64).to(gates_dtype).requires_grad_()
    tokens = torch.randn(2, 9, dtype=torch.float64).to(tokens_dtype).requires_grad_()
    if states_name == "–":
        words = f"gates have dtype {gates_dtype}, tokens {tokens_dtype}; float64 does not mix"
        with pytest.raises(TypeError, match=words):
            linear_scan(gates, tokens)
        return
    states_dtype = getattr(torch, states_name)
    states, last = linear_scan(gates, tokens, return_final_state=True)
    assert (states.dtype, last.dtype) == (states_dtype, compute_dtype(states_dtype))
    copies = [wide(t.detach()).requires_grad_() for t in (gates, tokens)]
    expected, expected_last = plainly(*copies)
    rounding = max(ROUNDING[dtype] for dtype in (gates_dtype, tokens_dtype, states_dtype))
    # What is expected has the roundings of float64 itself.
    assert_close(states, expected, 8 * ROUNDING[states_dtype])
    assert_close(last, expected_last, 8 * ROUNDING[last.dtype])
    weight = torch.randn_like(states)
    grads = torch.autograd.grad(states, (gates, tokens), weight)
    expected_grads = torch.autograd.grad(expected, copies, weight.to(expected.dtype))
    for leaf, grad, ref in zip((gates, tokens), grads, expected_grads, strict=True):
        assert grad.dtype == leaf.dtype
        assert_close(grad, ref, 8 * rounding)


def test_float32_gates_are_not_rounded_to_the_dtype_of_tokens() -> None:
    """Decays close to one are what float32 gates are for."""
    gates = torch.full((1, 2000), 1 - 2.0**-12)
    tokens = torch.ones(1, 2000, dtype=torch.bfloat16)
    states = linear_scan(gates, tokens)
    expected = (1 - float(gates[0, 0]) ** 2000) / 2.0**-12
    assert states.dtype == torch.bfloat16
    assert (
        abs(float(states[0, -1]) / expected - 1) < 2.0**-8
    )  # 2000 with gates of bfloat16, which are 1


@pytest.mark.parametrize(
    ("states", "given_", "accepted"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float64, True),
        (torch.float64, torch.float32, True),
        (torch.complex64, torch.float32, True),
        (torch.float32, torch.complex64, False),
        (torch.float32, torch.int64, False),
        (torch.complex64, torch.bool, False),
    ],
    ids=str,
)
def test_dtype_of_the_initial_state(
    plainly: Oracle, states: torch.dtype, given_: torch.dtype, accepted: bool
) -> None:
    gates, tokens = torch.rand(3, 4).to(states), torch.randn(3, 4).to(states)
    initial = torch.ones(3, dtype=given_)
    if not accepted:
        words = f"initial_state has dtype {given_}, which does not go with states of {states}"
        with pytest.raises(TypeError, match=words):
            linear_scan(gates, tokens, initial)
        return
    initial.requires_grad_()
    out, last = linear_scan(gates, tokens, initial, return_final_state=True)
    assert (out.dtype, last.dtype) == (states, compute_dtype(states))
    expected, _ = plainly(gates, tokens, initial.detach())
    assert_close(out, expected, 8 * ROUNDING[states])
    (grad,) = torch.autograd.grad(last.abs().sum(), initial)
    assert (grad.dtype, grad.shape) == (given_, initial.shape)


# --- Nothing at all ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("gate_shape", "shape", "dim", "bounds"),
    [
        ((0,), (0,), 0, None),
        ((2, 0), (2, 0), 1, None),
        ((2, 1), (2, 0), 1, None),
        ((0, 3), (0, 3), 1, None),
        ((3,), (0, 3), 1, None),
        ((1,), (2, 0, 4), 2, None),
        ((4, 0, 2), (4, 0, 2), 0, None),
        ((2, 0), (2, 0), 1, (0, 0)),
        ((2, 1), (2, 0), 1, (0, 0, 0, 0)),
        ((1, 3), (0, 3), 1, (0, 1, 1, 3)),
    ],
)
def test_empty_tensors(
    gate_shape: tuple[int, ...],
    shape: tuple[int, ...],
    dim: int,
    bounds: tuple[int, ...] | None,
    reverse: bool,
    backend: str,
) -> None:
    """No element is no reason to fail: states are empty, and final states the initial ones."""
    gates = torch.rand(gate_shape, requires_grad=True)
    tokens = torch.randn(shape, requires_grad=True)
    of_state = [*shape[:dim], *([] if bounds is None else [len(bounds) - 1]), *shape[dim + 1 :]]
    initial = torch.randn(of_state, requires_grad=True)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    run = partial(linear_scan, dim=dim, reverse=reverse, cu_seqlens=cu_seqlens, backend=backend)
    assert run(gates, tokens).shape == shape
    states, last = run(gates, tokens, initial, return_final_state=True)
    assert (states.shape, last.shape) == (shape, tuple(of_state))
    assert torch.equal(last, initial)
    zeros = run(gates, tokens, return_final_state=True)[1]
    assert torch.equal(zeros, torch.zeros(of_state))
    weight = torch.randn_like(last)
    grads = torch.autograd.grad((states, last), (gates, tokens, initial), (states.detach(), weight))
    assert torch.equal(grads[0], torch.zeros(gate_shape))
    assert grads[1].shape == shape
    assert torch.equal(grads[2], weight)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_empty_tensors_with_gaps(dim: int, every: int) -> None:
    gates, tokens = (torch.rand(0, 4)[:, ::every] for _ in range(2))
    assert linear_scan(gates, tokens, dim=dim).shape == (0, 4 // every)
    assert linear_scan(gates.mT, tokens.mT, dim=dim, reverse=True).shape == (4 // every, 0)
