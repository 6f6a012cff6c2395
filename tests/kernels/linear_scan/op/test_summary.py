"""``linear_scan_summary`` on the CPU: what it gives, its derivatives, and what torch makes of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.library import opcheck

from scan_registry import linear_scan, linear_scan_summary

Oracle = Callable[..., tuple[Tensor, Tensor]]

OPERATOR = torch.ops.scan_registry.linear_scan_summary.default
#: Shapes of gates and tokens, and dim.
CASES = {
    "rows": ((2, 3, 7), (2, 3, 7), -1),
    "columns": ((2, 7, 3), (2, 7, 3), 1),
    "one step": ((2, 1), (2, 1), -1),
    "decay per channel": ((3, 1), (2, 3, 5), -1),
    "decay per step": ((5, 1), (2, 5, 3), 1),
    "tokens broadcast": ((4, 5), (5,), 1),
    "one sequence": ((11,), (11,), 0),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def inputs(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Gates of both signs, among them a zero, and tokens."""
    of_gates, of_tokens, _ = CASES[name]
    gates, tokens = torch.randn(of_gates, dtype=dtype), torch.randn(of_tokens, dtype=dtype)
    gates.view(-1)[gates.numel() // 2] = 0
    return gates.requires_grad_(), tokens.requires_grad_()


def step_by_step(
    plainly: Oracle, gates: Tensor, tokens: Tensor, **how: Any
) -> tuple[Tensor, Tensor]:
    """Final states from one without tokens, which is the product of the gates, and from zero."""
    gates, tokens = torch.broadcast_tensors(gates, tokens)
    _, final_state = plainly(gates, tokens, **how)
    _, final_gate = plainly(gates, torch.zeros_like(tokens), torch.ones_like(final_state), **how)
    return final_gate, final_state


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_is_the_map_of_all_steps(name: str, reverse: bool, backend: Any, plainly: Oracle) -> None:
    gates, tokens = inputs(name)
    how: dict[str, Any] = {"dim": CASES[name][2], "reverse": reverse}
    found = linear_scan_summary(gates, tokens, backend=backend, **how)
    expected = step_by_step(plainly, gates, tokens, **how)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_give_the_whole(reverse: bool) -> None:
    """Each piece starts from the state that the summaries of those before it make."""
    gates, tokens = (torch.randn(3, 101, dtype=torch.float64) for _ in range(2))
    initial = torch.randn(3, dtype=torch.float64)
    bounds = [0, 13, 13, 14, 61, 101]
    pieces = [slice(*pair) for pair in pairwise(bounds)]
    state = initial
    for piece in reversed(pieces) if reverse else pieces:
        gate, shift = linear_scan_summary(gates[:, piece], tokens[:, piece], reverse=reverse)
        state = gate * state + shift
    _, expected = linear_scan(gates, tokens, initial, reverse=reverse, return_final_state=True)
    torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


def test_no_steps_change_nothing() -> None:
    gates, tokens = (torch.randn(2, 0, 3, requires_grad=True) for _ in range(2))
    final_gate, final_state = linear_scan_summary(gates, tokens, dim=1)
    assert torch.equal(final_gate, torch.ones(2, 3))
    assert torch.equal(final_state, torch.zeros(2, 3))
    (final_gate.sum() + final_state.sum()).backward()
    assert gates.grad is not None
    assert gates.grad.shape == gates.shape
    assert linear_scan_summary(torch.ones(0, 4), torch.ones(0, 4))[0].shape == (0,)


@pytest.mark.parametrize(
    ("gates", "tokens", "result"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float16, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.float32, torch.complex64, torch.complex64),
        (torch.complex64, torch.float32, torch.complex64),
    ],
)
def test_dtypes(
    gates: torch.dtype, tokens: torch.dtype, result: torch.dtype, plainly: Oracle
) -> None:
    a, x = torch.rand(4, 97).to(gates), torch.randn(4, 97).to(tokens)
    found = linear_scan_summary(a, x)
    assert {tensor.dtype for tensor in found} == {result}
    for out, expected in zip(found, step_by_step(plainly, a, x), strict=True):
        assert (out - expected).norm() <= 1e-5 * expected.norm()


def test_errors_of_like_gates_do_not_add_up() -> None:
    gates = torch.full((1, 100_000), 1 - 1e-5)
    final_gate, _ = linear_scan_summary(gates, torch.zeros_like(gates))
    assert abs(final_gate / gates[0, 0].double() ** 100_000 - 1) < 1e-6


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_derivatives(name: str, reverse: bool) -> None:
    """Also where a gate is zero, whose gradient no quotient gives."""

    def summary(gates: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return linear_scan_summary(gates, tokens, dim=CASES[name][2], reverse=reverse)

    assert gradcheck(summary, inputs(name), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(summary, inputs(name))


def test_complex_derivatives() -> None:
    assert gradcheck(linear_scan_summary, inputs("rows", torch.complex128))


@pytest.mark.parametrize("result", [0, 1])
def test_derivatives_of_one_result(result: int, plainly: Oracle) -> None:
    gates, tokens = inputs("rows")
    found = torch.autograd.grad(
        linear_scan_summary(gates, tokens)[result].sum(), (gates, tokens), allow_unused=True
    )
    expected = torch.autograd.grad(
        step_by_step(plainly, gates, tokens)[result].sum(), (gates, tokens), materialize_grads=True
    )
    torch.testing.assert_close(found[0], expected[0])
    if result == 0:
        assert found[1] is None or not found[1].any()
    else:
        torch.testing.assert_close(found[1], expected[1])


def test_what_needs_no_gradient_gets_none() -> None:
    gates, tokens = inputs("rows")
    linear_scan_summary(gates.detach(), tokens)[1].sum().backward()
    assert gates.grad is None
    assert tokens.grad is not None
    assert linear_scan_summary(gates.detach(), tokens.detach())[0].grad_fn is None


def test_forward_mode() -> None:
    gates, tokens = (tensor.detach() for tensor in inputs("rows"))
    tangent = torch.randn_like(gates)
    _, expected = torch.func.jvp(lambda g: linear_scan_summary(g, tokens), (gates,), (tangent,))
    with forward_ad.dual_level():
        found = linear_scan_summary(forward_ad.make_dual(gates, tangent), tokens)
        tangents = [forward_ad.unpack_dual(each).tangent for each in found]
    torch.testing.assert_close(tuple(tangents), expected)


@pytest.mark.parametrize("in_dims", [(0, 0), (1, 0), (None, 1), (2, None)])
def test_vmap(in_dims: tuple[int | None, int | None]) -> None:
    gates, tokens = (torch.randn(4, 4, 4, dtype=torch.float64) for _ in range(2))
    found = torch.vmap(linear_scan_summary, in_dims)(gates, tokens)
    singles = [
        linear_scan_summary(
            *(
                t if d is None else t.select(d, n)
                for t, d in zip((gates, tokens), in_dims, strict=True)
            )
        )
        for n in range(4)
    ]
    for out, parts in zip(found, zip(*singles, strict=True), strict=True):
        torch.testing.assert_close(out, torch.stack(parts))


@pytest.mark.parametrize("name", ["rows", "columns", "decay per channel"])
def test_opcheck(name: str) -> None:
    gates, tokens = inputs(name, torch.float32)
    opcheck(OPERATOR, (gates, tokens, CASES[name][2] - (CASES[name][2] >= 0) * 3, True, "auto"))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    def model(gates: Tensor, tokens: Tensor) -> Tensor:
        final_gate, final_state = linear_scan_summary(gates.sigmoid(), tokens)
        return final_gate.sum() + (final_state**2).sum()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for time in (7, 12):
        gates, tokens = (torch.randn(2, time, requires_grad=True) for _ in range(2))
        found = torch.autograd.grad(compiled(gates, tokens), (gates, tokens))
        torch.testing.assert_close(
            found, torch.autograd.grad(model(gates, tokens), (gates, tokens))
        )


@pytest.mark.parametrize(
    ("error", "words", "given"),
    [
        (TypeError, "tokens must be a torch.Tensor, not int", {"tokens": 3}),
        (ValueError, "must broadcast to one shape", {"tokens": torch.ones(2, 4)}),
        (ValueError, "dim is 2", {"dim": 2}),
        (TypeError, "reverse is 3", {"reverse": 3}),
        (ValueError, "needs a CUDA device", {"backend": "cuda"}),
        (ValueError, "backend is 'best'", {"backend": "best"}),
    ],
)
def test_bad_arguments(error: type[Exception], words: str, given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"gates": torch.ones(2, 3), "tokens": torch.ones(2, 3), **given}
    with pytest.raises(error, match=words):
        linear_scan_summary(**arguments)
