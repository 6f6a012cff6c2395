"""``RGLRU``: the paper's formula in float64, and transformers' module with the same state dict."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from scan_registry import nn

WIDTH, HEADS = 12, 3


def loop(m: nn.RGLRU, x: Tensor, reset: Tensor, h: Tensor | None = None) -> Tensor:
    """De et al. (2024), equations 1 to 4, and what is computed at a reset."""
    blocks = x.unflatten(-1, (HEADS, -1))
    r = torch.einsum("bthi,hij->bthj", blocks, m.recurrent_gate_weight) + m.recurrent_gate_bias
    i = torch.einsum("bthi,hij->bthj", blocks, m.input_gate_weight) + m.input_gate_bias
    r, i = r.flatten(-2).sigmoid(), i.flatten(-2).sigmoid()
    a = torch.exp(-8 * r * softplus(m.recurrent_param))
    outputs = []
    h = torch.zeros_like(x[:, 0]) if h is None else h
    for t in range(x.shape[1]):
        goes_on = a[:, t] * h + (1 - a[:, t] ** 2).sqrt() * i[:, t] * x[:, t]
        h = torch.where(reset[:, t, None], i[:, t] * x[:, t], goes_on)
        outputs.append(h)
    return torch.stack(outputs, 1)


def given(dtype: torch.dtype = torch.float64) -> tuple[nn.RGLRU, Tensor, Tensor]:
    torch.manual_seed(0)
    m = nn.RGLRU(WIDTH, HEADS, dtype=dtype)
    with torch.no_grad():
        m.input_gate_bias.normal_()
        m.recurrent_gate_bias.normal_()
    return m, torch.randn(2, 15, WIDTH, dtype=dtype), torch.rand(2, 15) < 0.2


def test_it_is_the_formula() -> None:
    m, x, reset = given()
    h = torch.randn(2, WIDTH).double()
    never = torch.zeros_like(reset)
    torch.testing.assert_close(m(x), loop(m, x, never))
    torch.testing.assert_close(m(x, initial_state=h, reset=reset), loop(m, x, reset, h))


def test_it_is_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    m, x, reset = given(torch.float32)
    config = SimpleNamespace(num_attention_heads=HEADS, lru_width=WIDTH)
    theirs = modeling.RecurrentGemmaRglru(config)
    theirs.load_state_dict(m.state_dict())  # the same names, and no other
    reset[:, 0] = True  # as at a prompt's first token
    positions = torch.where(reset, 0, 1)
    weight = torch.randn(2, 15, WIDTH)
    results = []
    for module, options in ((m, {"reset": reset}), (theirs, {"position_ids": positions})):
        inputs = x.clone().requires_grad_()
        y = module(inputs, **options)
        gradients = torch.autograd.grad((y * weight).sum(), [inputs, *module.parameters()])
        names = ["x", *(name for name, _ in module.named_parameters())]
        results.append((y, dict(zip(names, gradients, strict=True))))
    (y, ours), (expected, others) = results
    torch.testing.assert_close(y, expected)
    assert ours.keys() == others.keys()
    for name, gradient in others.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)
    # And it generates as theirs does: one token after the prompt.
    token = torch.randn(2, 1, WIDTH)
    with torch.no_grad():
        after = theirs(token, torch.full((2, 1), 15))
        _, state = m(x, reset=reset, return_final_state=True)
        stepped, _ = m.step(token[:, 0], state)
    torch.testing.assert_close(stepped, after[:, 0])


def test_the_state_dict_of_recurrentgemma_loads_too() -> None:
    m, x, _ = given()
    theirs = {
        "a_param": m.recurrent_param,
        "input_gate.w": m.input_gate_weight,
        "input_gate.b": m.input_gate_bias,
        "a_gate.w": m.recurrent_gate_weight,
        "a_gate.b": m.recurrent_gate_bias,
    }
    other = nn.RGLRU(WIDTH, HEADS, dtype=torch.float64)
    assert not torch.equal(other(x), m(x))
    torch.nn.ModuleDict({"lru": other}).load_state_dict({f"lru.{k}": v for k, v in theirs.items()})
    assert torch.equal(other(x), m(x))


def test_decays_begin_on_the_ring() -> None:
    torch.manual_seed(0)
    m = nn.RGLRU(4096, 4, w_init_variance_scale=0.5)
    squares = torch.exp(-2 * softplus(m.recurrent_param.detach().double()))
    assert float(squares.min()) == pytest.approx(0.81, abs=1e-3)
    assert float(squares.max()) == pytest.approx(0.998001, abs=1e-3)
    # Evenly over the ring's area: squares are uniform.
    assert float(squares.mean()) == pytest.approx((0.81 + 0.998001) / 2, abs=4e-3)
    assert float(m.input_gate_weight.detach().std()) == pytest.approx((0.5 / 1024) ** 0.5, rel=0.01)
    assert not m.input_gate_bias.any()


def test_the_roots_slope_is_capped() -> None:
    """Where a decay rounds to 1, the root has no finite slope of its own."""
    m = nn.RGLRU(4, 1)
    with torch.no_grad():
        m.recurrent_param.fill_(-60)
    x = torch.randn(2, 5, 4, requires_grad=True)
    m(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (x, *m.parameters()))
