"""What narrow states do to outputs: the emulation agrees with the operator, and roundings are what they are called."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from scan_registry import selective_state_update


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> Any:
    return load_tool("state_formats")


def test_stochastic_rounding_takes_a_neighbour_and_is_right_in_the_mean(tool: Any) -> None:
    torch.manual_seed(0)
    x = torch.tensor([1.0 + 2.0**-10, -3.3, 1e-3, 448.0, 0.0])
    drawn = torch.stack([tool.stochastic(7, -126)(x) for _ in range(4000)])
    assert torch.equal(drawn, drawn.bfloat16().float())
    gaps = (drawn.amax(0) - drawn.amin(0)) / x.abs().clamp_min(1e-9)
    assert (gaps <= 2.0**-7).all()
    torch.testing.assert_close(drawn.mean(0), x, rtol=3e-4, atol=0)


def test_rows_of_8_bits_have_a_scale(tool: Any) -> None:
    """Which their largest state decides, and which is none for a row of zeros."""
    x = torch.tensor([[1270.0, 14.0, 16.0], [0.127, 0.0014, 0.0016], [0, 0, 0]])
    rounded, _ = tool.FORMATS["int8"]
    expected = torch.tensor([[1270.0, 10.0, 20.0], [0.127, 0.001, 0.002], [0, 0, 0]])
    torch.testing.assert_close(rounded(x), expected)


def test_a_bfloat16_state_is_rounded_as_the_operator_rounds_it(tool: Any) -> None:
    """Each state is a channel of its own here, with a step size of one and B and C of one."""
    torch.manual_seed(0)
    tokens = tool.inputs(tool.Layer(1, 4, 16, tied=True))
    state = torch.zeros(1, 64, 1, dtype=torch.bfloat16)
    one, rounded = torch.ones(1, 1), tool.FORMATS["bfloat16"][0]
    for _ in range(20):
        gates, added, _ = (t.float() for t in next(tokens))
        A, x = gates[0, 0].log().expand(4, 16).reshape(64, 1), added[0, 0].reshape(1, 64)
        emulated = torch.exp(A) * state.float() + x.unsqueeze(-1)
        y = selective_state_update(state, x, one.expand(1, 64), A, one, one)
        torch.testing.assert_close(y, emulated.squeeze(-1))
        torch.testing.assert_close(state.float(), rounded(emulated))


def test_int8_errors_are_beyond_those_of_bfloat16(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "PROMPT", 200)
    tool.main(["--tokens", "4", "32"])
    errors: dict[str, list[float]] = {}
    for line in capsys.readouterr().out.splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if name in tool.FORMATS:
            errors.setdefault(name, []).extend(float(cell.split()[1]) for cell in cells)
    assert all(len(of) == 2 * len(tool.DECAYS) for of in errors.values())
    assert [*errors] == [*tool.FORMATS]
    assert max(errors["float32"]) < 1e-6
    for narrow, wide in zip(errors["int8"], errors["bfloat16"], strict=True):
        assert wide < narrow < 10 * wide
