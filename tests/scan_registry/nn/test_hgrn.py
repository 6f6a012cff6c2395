"""``HGRN``: the layer of flash-linear-attention, from its formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import nn


def loop(m: nn.HGRN, x: Tensor, bound: Tensor | float, h: Tensor | None = None) -> Tensor:
    """Forget gates from the bound up, states, and their norm times a gate."""
    f = bound + (1 - bound) * (x @ m.f_proj.weight.T).sigmoid()
    i = x @ m.i_proj.weight.T
    token = (1 - f) * i * i.sigmoid()
    states = []
    for t in range(x.shape[1]):
        h = token[:, t] if h is None else f[:, t] * h + token[:, t]
        states.append(h)
    h = torch.stack(states, 1)
    normed = h / (h.square().mean(-1, keepdim=True) + m.g_norm.eps).sqrt()
    if m.g_norm.weight is not None:
        normed = normed * m.g_norm.weight
    g = x @ m.g_proj.weight.T
    return (normed * g * g.sigmoid()) @ m.o_proj.weight.T


def given(**options: Any) -> tuple[nn.HGRN, Tensor]:
    torch.manual_seed(0)
    m = nn.HGRN(6, 2, dtype=torch.float64, **options)
    if m.g_norm.weight is not None:
        torch.nn.init.normal_(m.g_norm.weight)
    return m, torch.randn(3, 14, 6).double()


@pytest.mark.parametrize("affine", [True, False])
def test_it_is_the_formula(affine: bool) -> None:
    m, x = given(elementwise_affine=affine, norm_eps=1e-3)
    h, bound = torch.randn(3, 12).double(), torch.rand(12).double()
    torch.testing.assert_close(m(x), loop(m, x, 0.0))
    torch.testing.assert_close(m(x, lower_bound=0.3), loop(m, x, 0.3))
    result = m(x, lower_bound=bound, initial_state=h)
    torch.testing.assert_close(result, loop(m, x, bound, h))


@pytest.mark.parametrize("bound", [None, 0.25, "learned"])
def test_steps_take_the_bound(bound: Any) -> None:
    m, x = given()
    if bound == "learned":
        bound = torch.rand(12).double().requires_grad_()
    whole = m(x, lower_bound=bound)
    outputs, state = [], None
    for token in x.unbind(1):
        y, state = m.step(token, state, lower_bound=bound)
        outputs.append(y)
    result = torch.stack(outputs, 1)
    torch.testing.assert_close(result, whole)
    if isinstance(bound, Tensor):
        weight = torch.randn_like(whole)
        (one,) = torch.autograd.grad((result * weight).sum(), bound)
        (other,) = torch.autograd.grad((whole * weight).sum(), bound)
        torch.testing.assert_close(one, other)
        assert one.any()


def test_bounds_that_do_not_fit() -> None:
    m, x = given()
    for call in (lambda bound: m(x, lower_bound=bound), lambda b: m.step(x[:, 0], lower_bound=b)):
        with pytest.raises(
            ValueError, match=r"lower_bound is 1.5; accepted are numbers from 0 to 1"
        ):
            call(1.5)
        with pytest.raises(TypeError, match=r"lower_bound must be a number, .* not str"):
            call("none")
    narrow = nn.HGRN(6, 2)
    with pytest.raises(TypeError, match=r"lower_bound .*dtype .*torch\.float64"):
        narrow(x.float(), lower_bound=torch.rand(12).double())


def test_the_state_dict_is_flash_linear_attentions() -> None:
    sizes = {name: tuple(value.shape) for name, value in given()[0].state_dict().items()}
    assert sizes == {
        "i_proj.weight": (12, 6),
        "f_proj.weight": (12, 6),
        "g_proj.weight": (12, 6),
        "g_norm.weight": (12,),
        "o_proj.weight": (6, 12),
    }
    assert "g_norm.weight" not in given(elementwise_affine=False)[0].state_dict()
