"""``linear_scan_step``: one step in place, against the scan, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scan_registry import linear_scan, linear_scan_step

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.complex64, torch.complex128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_are_those_of_a_scan(dtype: torch.dtype) -> None:
    """Of a state in the dtype of the computation, as the final state of ``linear_scan`` is."""
    torch.manual_seed(0)
    gates, tokens = torch.rand(2, 3, 5, 7).to(dtype)
    expected, last = linear_scan(gates, tokens, return_final_state=True)
    state = torch.zeros(3, 5, dtype=last.dtype)
    for t in range(7):
        assert linear_scan_step(state, gates[..., t], tokens[..., t]) is state
        torch.testing.assert_close(state.to(dtype), expected[..., t])
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gates", ["narrow", "float32"])
def test_narrow_states_are_rounded_once(dtype: torch.dtype, gates: str) -> None:
    torch.manual_seed(0)
    state, token = torch.randn(2, 40, 50).to(dtype)
    gate = torch.rand(40, 50)
    if gates == "narrow":
        gate = gate.to(dtype)
    expected = (gate.double() * state.double() + token.double()).to(torch.float32)
    linear_scan_step(state, gate, token)
    # Of the last bit of float32, which rounding may carry over in a few elements.
    assert (state != expected.to(dtype)).sum() <= 2


def test_gates_and_tokens_broadcast_and_lie_anyhow() -> None:
    torch.manual_seed(0)
    gate, token = torch.rand(5), torch.randn(5, 3).T
    state = torch.randn(5, 3).T
    expected = gate * state + token
    torch.testing.assert_close(linear_scan_step(state, gate, token), expected)
    assert state.stride() == (1, 3)


def test_compiled_as_a_whole() -> None:
    gate, token, state = torch.rand(3, 4, 5).unbind()
    one, other = state.clone(), state.clone()

    def called(state: torch.Tensor) -> torch.Tensor:
        return linear_scan_step(state, gate, token) * 2

    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(one), called(other))
    assert torch.equal(one, other)
    assert not torch.equal(one, state)


def test_derivatives_are_refused() -> None:
    state, gate, token = torch.randn(2, 3), torch.rand(2, 3, requires_grad=True), torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"no derivative.*no_grad"):
        linear_scan_step(state, gate, token)
    with torch.no_grad():
        linear_scan_step(state, gate, token)
    weight = torch.randn(2, 3, requires_grad=True)
    product = (state * weight).sum()
    linear_scan_step(state, gate.detach(), token)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_state_made_for_inference_is_not_changed_outside_of_it() -> None:
    with torch.inference_mode():
        state = torch.ones(2, 3)
        linear_scan_step(state, torch.zeros(2, 3), torch.full((2, 3), 2.0))
    with pytest.raises(RuntimeError, match=r"pass state.clone\(\)"):
        linear_scan_step(state, torch.zeros(2, 3), torch.zeros(2, 3))
    assert torch.equal(state.clone(), torch.full((2, 3), 2.0))


def test_vmap_is_refused() -> None:
    with pytest.raises(RuntimeError, match="linear_scan_step changes state in place"):
        torch.vmap(linear_scan_step)(*torch.rand(3, 4, 2, 5))


def test_empty() -> None:
    assert linear_scan_step(torch.zeros(0, 3), torch.zeros(3), torch.zeros(0, 3)).shape == (0, 3)


S, G = torch.zeros(2, 3), torch.zeros(2, 3)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tensor": (lambda: linear_scan_step(S, 0.5, G), TypeError, "gate must be a torch.Tensor"),  # type: ignore[arg-type]
    "integers": (lambda: linear_scan_step(S, G.int(), G), TypeError, "gate has dtype torch.int32"),
    "sparse": (lambda: linear_scan_step(S, G, G.to_sparse()), TypeError, "token is sparse"),
    "float64": (
        lambda: linear_scan_step(S, G.double(), G),
        TypeError,
        "float64 does not mix with narrower dtypes",
    ),
    "complex": (
        lambda: linear_scan_step(S, G, G.to(torch.complex64)),
        TypeError,
        "token has dtype torch.complex64, which does not go with a state of torch.float32",
    ),
    "shape": (
        lambda: linear_scan_step(S, torch.zeros(4, 2, 3), G),
        ValueError,
        r"gate has shape \(4, 2, 3\); it must broadcast to the state's shape, \(2, 3\)",
    ),
    "expanded": (
        lambda: linear_scan_step(torch.zeros(3).expand(2, 3), G, G),
        ValueError,
        "state is expanded",
    ),
    "device": (
        lambda: linear_scan_step(S, G.to("meta"), G),
        ValueError,
        "gate is on meta, state on cpu",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
