"""The stand-ins for ``causal_conv1d``: its signatures, and what torch's own convolution gives."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional

from scan_registry.compat import causal_conv1d as compat
from scan_registry.compat.causal_conv1d import cpp_functions

SIGNATURES = {
    "causal_conv1d_fn": "x weight bias=None seq_idx=None initial_states=None return_final_states=False "
    "final_states_out=None activation=None",
    "causal_conv1d_update": "x conv_state weight bias=None activation=None cache_seqlens=None "
    "conv_state_indices=None",
    "causal_conv1d_varlen_states": "x cu_seqlens state_len",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_name_for_name(name: str) -> None:
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    result = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert result == SIGNATURES[name].split()


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_a_convolution(dtype: torch.dtype, activation: str | None) -> None:
    x, weight, bias = torch.randn(2, 6, 20).to(dtype), torch.randn(6, 4), torch.randn(6)
    expected = functional.conv1d(
        x.double(), weight.double().unsqueeze(1), bias.double(), padding=3, groups=6
    )
    expected = expected[..., :20]
    if activation:
        expected = functional.silu(expected)
    actual = compat.causal_conv1d_fn(x, weight, bias, activation=activation)
    assert isinstance(actual, torch.Tensor)
    assert actual.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_final_states_go_where_they_are_wanted() -> None:
    x, weight = torch.randn(2, 6, 20), torch.randn(6, 4)
    start = torch.randn(2, 6, 3)
    y, last = compat.causal_conv1d_fn(x, weight, initial_states=start, return_final_states=True)
    assert torch.equal(last, x[..., -3:])
    out = torch.empty(2, 3, 6).transpose(1, 2)
    again, written = compat.causal_conv1d_fn(
        x, weight, initial_states=start, return_final_states=True, final_states_out=out
    )
    assert written is out
    assert torch.equal(out, last)
    assert torch.equal(y, again)
    alone = compat.causal_conv1d_fn(x, weight, initial_states=start, final_states_out=out.zero_())
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, y)
    assert (out == 0).all()
    with pytest.raises(TypeError, match=r"final_states_out must be a torch.Tensor, not int"):
        compat.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="final_states_out has shape"):
        compat.causal_conv1d_fn(x, weight, None, None, None, True, out[:1])


def test_steps_go_on_from_packed_sequences() -> None:
    """What serving does: a prompt of packed sequences, then a step of each."""
    bounds, weight = torch.tensor([0, 2, 2, 9]), torch.randn(5, 4)
    x = torch.randn(9, 5)
    states = compat.causal_conv1d_varlen_states(x, bounds, 4)
    assert states.shape == (3, 5, 4)
    assert torch.equal(states[2], x[5:].T)
    assert torch.equal(states[0, :, 2:], x[:2].T)
    assert (states[0, :, :2] == 0).all()
    assert (states[1] == 0).all()
    step = torch.randn(3, 5)
    actual = compat.causal_conv1d_update(step, states, weight)
    whole = torch.cat([x[2:], step[2:]]).T.unsqueeze(0)
    expected = compat.causal_conv1d_fn(whole, weight)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(actual[2], expected[0, :, -1])
    assert torch.equal(states[..., -1], step)


def test_packed_states_of_nothing() -> None:
    states = compat.causal_conv1d_varlen_states(torch.empty(0, 3), torch.tensor([0, 0]), 2)
    assert states.shape == (1, 3, 2)
    assert (states == 0).all()
    with pytest.raises(ValueError, match="total time, channels"):
        compat.causal_conv1d_varlen_states(torch.empty(1, 2, 3), torch.tensor([0, 0]), 2)
    x, bounds = torch.empty(4, 3), torch.tensor([0, 4])
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (([1.0], bounds, 2), TypeError, "x must be a torch.Tensor, not list"),
        ((x, [0, 4], 2), TypeError, "cu_seqlens must be a torch.Tensor, not list"),
        ((x, bounds.float(), 2), TypeError, "cu_seqlens has dtype torch.float32; accepted are"),
        ((x, bounds.to("meta"), 2), ValueError, "cu_seqlens is on meta, x on cpu"),
        ((x, bounds, -1), ValueError, "state_len is -1; it must be 0 or more"),
    ]
    for arguments, error, words in wrong:
        with pytest.raises(error, match=words):
            compat.causal_conv1d_varlen_states(*arguments)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("states", [True, False])
def test_functions_without_derivatives_are_those_with_them(bias: bool, states: bool) -> None:
    """What mamba_ssm's blocks call, forwards and backwards."""
    x = torch.randn(2, 20, 6).transpose(1, 2).requires_grad_()
    weight = torch.randn(6, 4, requires_grad=True)
    added = torch.randn(6, requires_grad=True) if bias else None
    before = torch.randn(2, 6, 3, requires_grad=True) if states else None
    expected, last = compat.causal_conv1d_fn(
        x, weight, added, None, before, True, None, activation="silu"
    )
    out = torch.zeros(2, 6, 3)
    y = cpp_functions.causal_conv1d_fwd_function(x, weight, added, None, before, out, True)
    assert torch.equal(y, expected)
    assert torch.equal(out, last)
    assert not y.requires_grad
    assert not out.requires_grad
    grads = torch.randn_like(y), torch.randn_like(last)
    right = [
        *torch.autograd.grad(
            (expected, last), [t for t in (x, weight, added, before) if t is not None], grads
        )
    ]
    written = torch.zeros(2, 40, 6)[:, ::2].transpose(1, 2)
    actual = cpp_functions.causal_conv1d_bwd_function(
        x, weight, added, grads[0], None, before, grads[1], written, states, True
    )
    assert actual[0] is written
    assert [t is not None for t in actual] == [True, True, bias, states]
    torch.testing.assert_close([t for t in actual if t is not None], right)
    other = cpp_functions.causal_conv1d_bwd_function(
        x, weight, added, grads[0], None, before, None, None, False, False
    )
    plain = compat.causal_conv1d_fn(x, weight, added, None, before)
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(other[:2], torch.autograd.grad(plain, (x, weight), grads[0]))


def test_the_derivative_refuses_what_does_not_fit() -> None:
    x, weight, last = torch.randn(2, 6, 20), torch.randn(6, 4), torch.randn(2, 6, 3)

    def backward(last: torch.Tensor, dx: torch.Tensor | None = None) -> Any:
        return cpp_functions.causal_conv1d_bwd_function(
            x, weight, None, x, None, None, last, dx, False, True
        )

    torch.testing.assert_close(backward(last.double())[0], backward(last)[0])
    for wrong in (last[..., :1], last[:1], last[0]):
        with pytest.raises(ValueError, match="the final state's gradient is"):
            backward(wrong)
    with pytest.raises(ValueError, match="dx has shape"):
        backward(last, torch.empty(3, 2, 6, 20))


def test_the_update_without_a_name_of_its_activation() -> None:
    step, state, weight = torch.randn(2, 6, 1), torch.randn(2, 6, 3), torch.randn(6, 4)
    other = state.clone()
    y = cpp_functions.causal_conv1d_update_function(step, state, weight, None, True, None, None)
    assert torch.equal(y, compat.causal_conv1d_update(step, other, weight, None, "silu"))
    assert torch.equal(state, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_without_derivatives_on_a_gpu(dtype: torch.dtype) -> None:
    """As mamba_ssm's blocks call them: between parts of wider rows, which gradients are written to, with weights of any dtype."""
    wide = torch.randn(2, 100, 160, device="cuda").to(dtype)
    x = wide[..., 32:128].transpose(1, 2)
    weight, bias = torch.randn(96, 4, device="cuda"), torch.randn(96, device="cuda")
    weight, bias = weight.to(dtype), bias.to(dtype)
    grad = torch.randn(2, 100, 96, device="cuda").to(dtype).transpose(1, 2)
    leaves = [t.detach().double().cpu().requires_grad_() for t in (x, weight, bias)]
    expected = compat.causal_conv1d_fn(*leaves, activation="silu")
    assert isinstance(expected, torch.Tensor)
    right = torch.autograd.grad(expected, leaves, grad.double().cpu())
    y = cpp_functions.causal_conv1d_fwd_function(x, weight, bias, None, None, None, True)
    assert y.transpose(1, 2).is_contiguous()
    written = torch.zeros_like(wide)
    actual = cpp_functions.causal_conv1d_bwd_function(
        x, weight, bias, grad, None, None, None, written[..., 32:128].transpose(1, 2), False, True
    )
    assert not written[..., :32].any()
    assert not written[..., 128:].any()
    results = [y, written[..., 32:128].transpose(1, 2), *(t for t in actual[1:3] if t is not None)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for result, wanted in zip(results, (expected, *right), strict=True):
        assert result.dtype == dtype
        error = (result.double().cpu() - wanted).norm() / wanted.norm()
        assert error < tolerance
