"""``MinGRU`` and ``MinLSTM``: the paper's formulas in float64, and the parameters of minGRU-pytorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import nn

ACTIVATIONS = {
    "positive": lambda x: torch.where(x >= 0, x + 0.5, x.sigmoid()),
    "identity": lambda x: x,
}


def run(
    gates: Callable[[Tensor], tuple[Tensor, Tensor]], m: Any, x: Tensor, h: Tensor | None = None
) -> Tensor:
    """One step after the other; ``gates`` gives what is kept of the state, and what is added."""
    outputs = []
    for t in range(x.shape[1]):
        kept, added = gates(x[:, t])
        h = added if h is None else kept * h + added
        outputs.append(m.to_out(h))
    return torch.stack(outputs, 1)


def min_gru(m: nn.MinGRU, x: Tensor, h: Tensor | None = None) -> Tensor:
    """Algorithm 6, and 1 for the identity: z = sigmoid(gate), h = (1 - z) h + z g(hidden)."""

    def gates(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, gate = (m.state_dict()["to_hidden_and_gate.weight"] @ x.T).T.chunk(2, -1)
        z = gate.sigmoid()
        return 1 - z, z * ACTIVATIONS[m.activation](hidden)

    return run(gates, m, x, h)


def min_lstm(m: nn.MinLSTM, x: Tensor, h: Tensor | None = None) -> Tensor:
    """Algorithm 8, and 3 for the identity: f and i over their sum."""

    def gates(x: Tensor) -> tuple[Tensor, Tensor]:
        weight = m.state_dict()["to_hidden_and_f_i_gate.weight"]
        hidden, f, i = (weight @ x.T).T.chunk(3, -1)
        f, i = f.sigmoid(), i.sigmoid()
        return f / (f + i), i / (f + i) * ACTIVATIONS[m.activation](hidden)

    return run(gates, m, x, h)


BOTH = pytest.mark.parametrize(
    ("of", "formula"), [(nn.MinGRU, min_gru), (nn.MinLSTM, min_lstm)], ids=["gru", "lstm"]
)


@BOTH
@pytest.mark.parametrize("activation", ["positive", "identity"])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_it_is_the_formula(of: Any, formula: Any, activation: Any, factor: float) -> None:
    torch.manual_seed(0)
    m = of(6, factor, activation=activation, dtype=torch.float64)
    x, h = torch.randn(3, 20, 6).double(), torch.randn(3, int(6 * factor)).double()
    torch.testing.assert_close(m(x), formula(m, x))
    torch.testing.assert_close(m(x, initial_state=h), formula(m, x, h))


@BOTH
def test_a_call_may_be_min_gru_pytorchs(of: Any, formula: Any) -> None:
    """Its own check: a token at a time from no state is the whole."""
    torch.manual_seed(0)
    m, x = of(6, 1.5, dtype=torch.float64), torch.randn(2, 9, 6).double()
    outputs, hidden = [], None
    for token in x.unbind(1):
        y, hidden = m(token[:, None], hidden, return_next_prev_hidden=True)
        outputs.append(y)
    assert hidden.shape == (2, 1, 9)
    torch.testing.assert_close(torch.cat(outputs, 1), m(x))
    _, last = m(x, return_final_state=True)
    torch.testing.assert_close(hidden[:, 0], last)
    bounds = torch.tensor([0, 4, 9])
    first = torch.randn(2, 2, 9).double()
    y, hidden = m(x, first, return_next_prev_hidden=True, cu_seqlens=bounds)
    other, last = m(x, initial_state=first, return_final_state=True, cu_seqlens=bounds)
    assert torch.equal(y, other)
    assert torch.equal(hidden, last)
    with pytest.raises(ValueError, match="prev_hidden or initial_state, got both"):
        m(x, first[:, :1], initial_state=first[:, 0])
    with pytest.raises(ValueError, match=r"prev_hidden of size \(batch, 1, 9\), got \(2, 2, 9\)"):
        m(x, torch.zeros(2, 2, 9))
    with pytest.raises(TypeError, match=r"prev_hidden is sparse; .* prev_hidden.to_dense\(\)"):
        m(x, torch.zeros(2, 1, 9).to_sparse())
    with pytest.raises(TypeError, match="Expected prev_hidden to be a Tensor, got float"):
        m(x, 0.0)
    with pytest.raises(ValueError, match=r"prev_hidden of size \(batch, 1, 9\), got \(2, 9\)"):
        m(x, first[:, 0])


def test_the_state_dict_is_min_gru_pytorchs() -> None:
    def sizes(m: Any) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in m.state_dict().items()}

    assert sizes(nn.MinGRU(4)) == {"to_hidden_and_gate.weight": (8, 4)}
    assert sizes(nn.MinGRU(4, 1.5)) == {
        "to_hidden_and_gate.weight": (12, 4),
        "to_out.weight": (4, 6),
    }
    assert sizes(nn.MinGRU(4, proj_out=True)) == {
        "to_hidden_and_gate.weight": (8, 4),
        "to_out.weight": (4, 4),
    }
    assert sizes(nn.MinLSTM(4, 2)) == {
        "to_hidden_and_f_i_gate.weight": (24, 4),
        "to_out.weight": (4, 8),
    }


@BOTH
def test_large_gates_are_finite(of: Any, formula: Any) -> None:
    m = of(4)
    x = torch.tensor([[[3e4], [-3e4]]]).expand(1, 2, 4)
    y = m(x.contiguous())
    y.square().mean().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


@pytest.mark.parametrize("name", ["MinGRU", "MinLSTM"])
def test_an_unknown_argument_is_refused_by_the_classs_name(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\.__init__\(\) got .* 'hidden_size'$"):
        getattr(nn, name)(64, hidden_size=32)
