"""Modules that torch's functions compute on the CPU: what is theirs, and that derivatives are as ever."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_sequence

from scan_registry import nn
from scan_registry.nn import torch_cells

KINDS = ("LSTM", "GRU", "RNN")


def run_by_torch(module: torch.nn.Module, *inputs: Any) -> tuple[Any, bool]:
    """What the module gives, and whether torch's function made it."""
    with patch.object(torch_cells, "run", wraps=torch_cells.run) as created:
        result = module(*inputs)
    return result, created.called


def test_what_torch_is_slower_at_it_does_not_do() -> None:
    """Few steps of an LSTM with large weights, and many packed steps of a small GRU."""
    with torch.no_grad():
        assert run_by_torch(nn.LSTM(3, 4), torch.randn(1, 2, 3))[1]
        assert run_by_torch(nn.LSTM(3, 255), torch.randn(32, 2, 3))[1]
        assert not run_by_torch(nn.LSTM(3, 256), torch.randn(32, 2, 3))[1]
        assert run_by_torch(nn.LSTM(3, 256), torch.randn(13, 5, 3))[1]
        assert run_by_torch(nn.RNN(3, 4), torch.randn(1, 3))[1]  # without a batch
        many = torch.randn(100, 2, 3)
        assert not run_by_torch(nn.GRU(3, 4), pack_sequence([*many.unbind(1)]))[1]
        assert run_by_torch(nn.GRU(3, 4, dtype=torch.float64), many.double())[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_is_called_where_its_cell_is_ours(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 2, 3, dtype=dtype)
    new = getattr(nn, kind)
    assert run_by_torch(new(3, 4, dtype=dtype), x)[1]
    assert run_by_torch(new(3, 4, dtype=dtype), pack_sequence([*x.unbind()]))[1]
    assert not run_by_torch(new(3, 4, dtype=dtype, backend="reference"), x)[1]
    assert not run_by_torch(new(3, 4, dtype=dtype), x[:0])[1]
    assert not run_by_torch(new(3, 4, dtype=torch.float16), x.half())[1]
    assert not run_by_torch(nn.SLSTM(3, 4, dtype=dtype), x)[1]


def test_torch_computes_an_lstm_in_bfloat16_where_the_cpu_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_torch(units: int, *shape: int, kind: str = "LSTM") -> bool:
        module = getattr(nn, kind)(3, units, dtype=torch.bfloat16)
        return run_by_torch(module, torch.randn(*shape, 3, dtype=torch.bfloat16))[1]

    assert by_torch(4, 5, 2) == torch_cells.has_bfloat16()
    monkeypatch.setattr(torch_cells, "has_bfloat16", lambda: False)
    assert not by_torch(4, 5, 2)
    monkeypatch.setattr(torch_cells, "has_bfloat16", lambda: True)
    assert by_torch(4, 5, 2)
    assert by_torch(256, 1, 1)
    assert not by_torch(257, 5, 2)
    assert not by_torch(4, 5, 2, kind="GRU")
    with torch.no_grad():
        assert by_torch(257, 5, 2)
    with torch.backends.mkldnn.flags(enabled=False):
        monkeypatch.undo()
        assert not by_torch(4, 5, 2)


@pytest.mark.parametrize("start", [False, True])
def test_bfloat16(start: bool) -> None:
    """As precise as this package's code, with all gradients, second ones too."""
    torch.manual_seed(0)
    if not torch_cells.has_bfloat16():
        pytest.skip("torch has no fast bfloat16 on this CPU")
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    half = nn.LSTM(5, 32, dtype=torch.bfloat16, **options)
    full = nn.LSTM(5, 32, dtype=torch.float64, **options)
    full.load_state_dict(half.state_dict())
    x, weight = torch.randn(3, 20, 5).bfloat16(), torch.randn(3, 20, 64).bfloat16()
    states = (torch.randn(2, 4, 3, 32).bfloat16(),) if start else ()
    result = []
    for module, dtype in ((half, torch.bfloat16), (full, torch.float64)):
        inputs = x.to(dtype).requires_grad_()
        (y, last), by_torch = run_by_torch(module, inputs, *(s.to(dtype).unbind() for s in states))
        assert by_torch
        leaves = [inputs, *module.parameters()]
        grads = torch.autograd.grad(y, leaves, weight.to(dtype), create_graph=True)
        second = torch.autograd.grad(grads[0].sum(), inputs)
        result.append([t.detach().double() for t in (y, *last, *grads, *second)])
    for one, other in zip(*result, strict=True):
        assert (one - other).norm() <= 0.015 * other.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_in_single_precision(kind: str) -> None:
    """torch has other functions for float32 than for float64; these have to have second derivatives, too."""
    torch.manual_seed(0)
    single = getattr(nn, kind)(3, 4, batch_first=True)
    double = getattr(nn, kind)(3, 4, batch_first=True, dtype=torch.float64)
    double.load_state_dict(single.state_dict())
    x = torch.randn(2, 5, 3)
    weight = torch.randn(2, 5, 4)
    result = []
    for module, dtype in ((single, torch.float32), (double, torch.float64)):
        inputs = x.to(dtype).requires_grad_()
        loss = (module(inputs)[0] * weight.to(dtype)).sum()
        (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
        result.append(torch.autograd.grad(grad.square().sum(), [inputs, *module.parameters()]))
    for one, other in zip(*result, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_and_transforms(kind: str) -> None:
    torch.manual_seed(0)
    module = getattr(nn, kind)(3, 4, dtype=torch.float64)
    x, along = torch.randn(2, 5, 2, 3, dtype=torch.float64).unbind()

    def run(x: Tensor) -> Tensor:
        out: Tensor = module(x)[0]
        return out

    step = 1e-6
    slope = (run(x + step * along) - run(x - step * along)) / (2 * step)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, along))).tangent
    torch.testing.assert_close(tangent, slope, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.func.jvp(run, (x,), (along,))[1], tangent)
    many = torch.stack([x, along])
    torch.testing.assert_close(torch.vmap(run)(many), torch.stack([run(x), run(along)]))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_computed_are_the_latest(kind: str) -> None:
    """torch.nn keeps a list of parameters, which parametrisations and functional calls go past."""
    torch.manual_seed(0)
    module, x = getattr(nn, kind)(3, 4), torch.randn(5, 2, 3)
    doubled = {name: value.detach() * 2 for name, value in module.named_parameters()}
    other = getattr(nn, kind)(3, 4)
    other.load_state_dict(doubled)
    result = torch.func.functional_call(module, doubled, x)[0]
    torch.testing.assert_close(result, other(x)[0])

    class Twice(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    for name in doubled:
        torch.nn.utils.parametrize.register_parametrization(module, name, Twice())
    torch.testing.assert_close(module(x)[0], other(x)[0])
    module(x)[0].sum().backward()
    of_weight = module.parametrizations.weight_hh_l0.original.grad
    assert of_weight is not None
    assert of_weight.abs().sum() > 0
