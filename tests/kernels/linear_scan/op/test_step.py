"""``linear_scan_step``: one step in place, against the scan, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import StepTests

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


def test_empty() -> None:
    assert linear_scan_step(torch.zeros(0, 3), torch.zeros(3), torch.zeros(0, 3)).shape == (0, 3)


class TestStep(StepTests):
    name, learned = "linear_scan_step", "gate"

    def draw(self) -> dict[str, Any]:
        return dict(zip(("state", "gate", "token"), torch.rand(3, 2, 3).unbind(), strict=True))

    def run(self, **arguments: Any) -> torch.Tensor:
        return linear_scan_step(**arguments)

    refused = {
        "no tensor": ({"gate": 0.5}, TypeError, "gate must be a torch.Tensor"),
        "integers": ({"gate": torch.zeros(2, 3).int()}, TypeError, "gate has dtype torch.int32"),
        "sparse": ({"token": torch.zeros(2, 3).to_sparse()}, TypeError, "token is sparse"),
        "float64": (
            {"gate": torch.zeros(2, 3).double()},
            TypeError,
            "float64 does not mix with narrower dtypes",
        ),
        "complex": (
            {"token": torch.zeros(2, 3, dtype=torch.complex64)},
            TypeError,
            "token has dtype torch.complex64, which does not go with a state of torch.float32",
        ),
        "shape": (
            {"gate": torch.zeros(4, 2, 3)},
            ValueError,
            r"gate has shape \(4, 2, 3\); it must broadcast to the state's shape, \(2, 3\)",
        ),
        "expanded": ({"state": torch.zeros(3).expand(2, 3)}, ValueError, "state is expanded"),
        "device": (
            {"gate": torch.zeros(2, 3).to("meta")},
            ValueError,
            "gate is on meta, state on cpu",
        ),
    }
