"""``rnn`` on the CPU: what it computes, its derivatives, its options, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from recurring import draw, error, gradients, plainly
from torch import Tensor

from scan_registry import rnn
from scan_registry.kernels.rnn.op.arguments import BACKENDS, FUNCTIONS
from scan_registry.kernels.rnn.problem import Function


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    return


# --- What it computes -------------------------------------------------------------------------


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 2, 4), (2, 20, 3, 7)])
def test_states_and_gradients(function: Function, shape: Any, start: bool) -> None:
    inputs = draw(function, shape)
    given = inputs if start else inputs[:3]
    states, last = rnn(*given, function=function)
    expected = plainly(function, *given)
    assert error(states, expected) < 1e-13
    assert torch.equal(last, states[:, :, -1:])
    found = gradients((states, last), given)
    wanted = gradients((expected, expected[:, :, -1:]), given)
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize("function", FUNCTIONS)
def test_only_the_last_state_counts(function: Function) -> None:
    inputs = draw(function)
    found = gradients(rnn(*inputs, function=function)[1:], inputs)
    wanted = gradients((plainly(function, *inputs)[:, :, -1:],), inputs)
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_narrow_dtypes(function: Function, dtype: torch.dtype, tolerance: float) -> None:
    inputs = draw(function, (2, 33, 2, 16), dtype)
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    made, expected = rnn(*inputs, function=function), plainly(function, *wide)
    assert made[0].dtype == made[1].dtype == dtype
    assert error(made[0].double(), expected) < tolerance
    for got, want in zip(
        gradients([made[0].double()], inputs), gradients([expected], wide), strict=True
    ):
        assert got.dtype == dtype
        assert error(got.double(), want) < tolerance


@pytest.mark.parametrize("function", ["lstm", "gru", "elman"])
def test_it_is_torchs(function: Function) -> None:
    """torch's weights (gates·D, I) and (gates·D, D) become one head's."""
    batch, time, dim = 3, 11, 8
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "elman": torch.nn.RNN}[function]
    module = kind(5, dim, batch_first=True)
    x = torch.randn(batch, time, 5)
    w, u = module.weight_ih_l0, module.weight_hh_l0
    wx = (x @ w.T).view(batch, time, -1, 1, dim)
    of_inputs, of_h = (bias.view(-1, 1, dim) for bias in (module.bias_ih_l0, module.bias_hh_l0))
    r = u.view(-1, 1, dim, dim)
    if function == "gru":  # torch has r, z, n
        r = r[[2, 0, 1]]
        b = torch.cat([of_h[2:], of_inputs[:2] + of_h[:2], of_inputs[2:]])
    else:
        b = of_inputs + of_h
    states, last = rnn(wx, r, b, function=function)
    expected, end = module(x)
    torch.testing.assert_close(states[0].squeeze(2), expected)
    ends = end if isinstance(end, tuple) else (end,)
    for state, each in zip(last, ends, strict=True):
        torch.testing.assert_close(state[:, 0, 0], each[0])
    parameters = [*module.parameters()]
    found = torch.autograd.grad(states[0].square().sum(), parameters)
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    torch.testing.assert_close(found, wanted)


def test_an_slstm_of_large_gates_stays_finite() -> None:
    """Neither exponential gates nor a first step whose input gate is next to nothing overflow."""
    for value in (-300.0, 300.0):
        wx, r, b, _ = (t.detach() for t in draw("slstm", dtype=torch.float32))
        wx[:, :, 0] = value
        wx.requires_grad_()
        states, _ = rnn(wx, r, b, function="slstm")
        (grad,) = torch.autograd.grad(states.sum(), wx)
        assert states.isfinite().all()
        assert grad.isfinite().all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_a_bias(function: Function) -> None:
    wx, r, b, states = draw(function)
    with_zeros = rnn(wx, r, torch.zeros_like(b), states, function=function)[0]
    assert torch.equal(rnn(wx, r, None, states, function=function)[0], with_zeros)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (3, 0, 2, 4), (3, 5, 0, 4), (3, 5, 2, 0)])
def test_nothing_to_do(function: Function, shape: Any) -> None:
    inputs = draw(function, shape)
    states, last = rnn(*inputs, function=function)
    assert states.shape == (inputs[3].shape[0], *shape[:2], *shape[2:])
    assert torch.equal(last, inputs[3])
    found = torch.autograd.grad(states.sum() + 2 * last.sum(), inputs)
    assert torch.equal(found[3], torch.full_like(inputs[3], 2))
    assert not any(grad.any() for grad in found[:3])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_how_tensors_lie_does_not_matter(function: Function) -> None:
    wx, r, b, states = draw(function, grad=False)
    expected = rnn(wx, r, b, states, function=function)[0]
    time_first = wx.transpose(0, 1).contiguous().transpose(0, 1)
    spread = torch.stack([wx, wx], -1)[..., 0]
    turned = r.transpose(2, 3).contiguous().transpose(2, 3)
    for given, matrix in product((wx, time_first, spread), (r, turned)):
        assert torch.equal(rnn(given, matrix, b, states, function=function)[0], expected)
    assert rnn(time_first, r, b, states, function=function)[0].stride(2) > states.stride(1)


def test_inputs_are_not_written() -> None:
    for function in FUNCTIONS:
        inputs = draw(function)
        before = [tensor.detach().clone() for tensor in inputs]
        states, last = rnn(*inputs, function=function)
        (states.sum() + last.sum()).backward()
        for tensor, was in zip(inputs, before, strict=True):
            assert torch.equal(tensor, was)


# --- Options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clipping_h(function: Function) -> None:
    """It is h that is clipped, at every step, and its gradient passes."""
    inputs = draw(function)
    clip = 0.1
    states, _ = rnn(*inputs, function=function, forward_clipval=clip)
    assert states[0].abs().max() == clip
    wx, r, b, start = (tensor.detach() for tensor in inputs)
    for t in range(wx.shape[1]):
        step = plainly(function, wx[:, t : t + 1], r, b, start)
        step = torch.cat([step[:1].clamp(-clip, clip), step[1:]])
        torch.testing.assert_close(states[:, :, t : t + 1], step)
        start = step
    (grad,) = torch.autograd.grad(states[0, :, -1].sum(), inputs[:1])
    assert (grad[:, -1] != 0).any(1).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_cutting_the_gradient_through_r(function: Function) -> None:
    """As if R's input had been a constant."""
    inputs = draw(function)
    states, _ = rnn(*inputs, function=function, gradient_recurrent_cut=True)
    found = gradients([states], inputs)
    wx, r, b, now = inputs
    every = []
    for t in range(wx.shape[1]):
        constant = torch.einsum("gndp,bnp->bgnd", r, now[0, :, 0].detach())
        moved = wx[:, t : t + 1].clone()
        nothing = torch.zeros_like(r)
        if function == "gru":
            # g is a bias of its own for every batch
            step = torch.cat(
                [
                    plainly(
                        function,
                        moved[k : k + 1] + torch.cat([constant[k, 1:], 0 * constant[k, :1]]),
                        nothing,
                        torch.cat([b[:1] + constant[k, :1], b[1:]]),
                        now[:, k : k + 1],
                    )
                    for k in range(wx.shape[0])
                ],
                1,
            )
        else:
            step = plainly(function, moved + constant.unsqueeze(1), nothing, b, now)
        every.append(step)
        now = step
    for got, want in zip(found, gradients([torch.cat(every, 2)], inputs), strict=True):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clipping_the_gradient_through_r(function: Function) -> None:
    inputs, clip = draw(function, (1, 2, 1, 3)), 1e-3
    clipped, cut = (
        torch.autograd.grad(
            100 * rnn(*inputs, function=function, **option)[0][0, :, 0].sum(), inputs
        )
        for option in ({"gradient_recurrent_clipval": clip}, {"gradient_recurrent_cut": True})
    )
    through = clipped[3][0] - cut[3][0]
    assert math.isclose(through.abs().max(), clip, rel_tol=1e-9)
    for one, other in zip(clipped[:3], cut[:3], strict=True):
        assert torch.equal(one, other)  # nothing has passed R before the last step's own


def test_large_clips_change_nothing() -> None:
    for function in FUNCTIONS:
        inputs = draw(function)
        plain = rnn(*inputs, function=function)
        wide = rnn(*inputs, function=function, gradient_recurrent_clipval=1e9, forward_clipval=1e9)
        assert torch.equal(plain[0], wide[0])
        for one, other in zip(gradients(plain, inputs), gradients(wide, inputs), strict=True):
            assert torch.equal(one, other)


# --- Derivatives ------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives_of_both_modes_and_orders(function: Function) -> None:
    """Along directions drawn at random, each of which meets every input."""
    inputs = draw(function, (2, 3, 2, 2))

    def call(*tensors: Tensor) -> Any:
        return rnn(*tensors, function=function)

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize(
    "option", [{"gradient_recurrent_clipval": 1.0}, {"gradient_recurrent_cut": True}]
)
def test_what_is_clipped_has_no_second_derivative(option: dict[str, Any]) -> None:
    inputs = draw("lstm")
    states, _ = rnn(*inputs, **option)
    with pytest.raises(RuntimeError, match="create_graph does not go with them"):
        torch.autograd.grad(states.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_transforms(function: Function) -> None:
    inputs = tuple(tensor.detach() for tensor in draw(function))

    def loss(*tensors: Tensor) -> Tensor:
        states, last = rnn(*tensors, function=function)
        return states.square().sum() + last.sum()

    leaves = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs)
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < 1e-12
    tangents = tuple(torch.randn_like(tensor) for tensor in inputs)
    _, dot = torch.func.jvp(loss, inputs, tangents)
    along = sum((g * t).sum() for g, t in zip(wanted, tangents, strict=True))
    torch.testing.assert_close(dot, along)
    many = torch.stack([inputs[1], 2 * inputs[1]])
    mapped = torch.func.vmap(lambda r: rnn(inputs[0], r, *inputs[2:], function=function)[0])(many)
    for each, r in zip(mapped, many, strict=True):
        torch.testing.assert_close(each, rnn(inputs[0], r, *inputs[2:], function=function)[0])
    with pytest.raises(ValueError, match=r"do not go with torch\.func"):
        torch.func.grad(
            lambda x: rnn(x, *inputs[1:], function=function, forward_clipval=1)[0].sum()
        )(inputs[0])


def test_batches_of_gradients() -> None:
    for function in FUNCTIONS:
        inputs = draw(function)
        states, _ = rnn(*inputs, function=function)
        grads = torch.randn(3, *states.shape, dtype=states.dtype)
        together = torch.autograd.grad(
            states, inputs, grads, is_grads_batched=True, retain_graph=True
        )
        for number, grad in enumerate(grads):
            alone = torch.autograd.grad(states, inputs, grad, retain_graph=True)
            for all_of_them, one in zip(together, alone, strict=True):
                torch.testing.assert_close(all_of_them[number], one)


# --- torch ------------------------------------------------------------------------------------

OP = torch.ops.scan_registry.rnn.default
BACKWARD = torch.ops.scan_registry.rnn_backward.default
NO_CLIPS = (math.inf, math.inf, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "grad", "dtype"),
    [
        ("lstm", True, torch.float32),
        ("gru", True, torch.bfloat16),
        ("elman", True, torch.float32),  # which has no cache
        ("slstm", True, torch.bfloat16),
        ("lstm", False, torch.bfloat16),
        ("elman", False, torch.float32),
    ],
)
def test_opcheck(function: Function, grad: bool, dtype: torch.dtype) -> None:
    wx, r, b, states = (t.detach() for t in draw(function, (2, 3, 2, 4), dtype))
    bias = b if dtype == torch.float64 else b.float()
    tensors = [t.requires_grad_(grad) for t in (wx, r, bias, states.squeeze(2))]
    tests: tuple[Any, ...] = "test_schema", "test_faketensor"
    if grad:
        tests = *tests, "test_autograd_registration", "test_aot_dispatch_dynamic"
    given = *tensors, None, None, function, "auto", *NO_CLIPS, grad
    torch.library.opcheck(OP, given, test_utils=tests)


@pytest.mark.parametrize(
    ("function", "time_first"), [("lstm", False), ("gru", True), ("elman", False), ("slstm", True)]
)
def test_opcheck_of_the_backward_operator(function: Function, time_first: bool) -> None:
    wx, r, b, states = (t.detach() for t in draw(function, (2, 3, 2, 4)))
    if time_first:
        wx = wx.transpose(0, 1).contiguous().transpose(0, 1)
    start = states.squeeze(2)
    every, last, cache = OP(wx, r, b, start, None, None, function, "auto", *NO_CLIPS, True)
    given = r, every, start, None, None, cache, torch.randn_like(every), torch.randn_like(last)
    torch.library.opcheck(
        BACKWARD,
        (*(t if t is None else t.requires_grad_() for t in given), function, "auto", *NO_CLIPS),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("function", ["elman", "slstm"])  # of fewest and of most states
def test_compile_without_a_break(function: Function) -> None:
    inputs = draw(function, dtype=torch.float32)

    def call(*tensors: Tensor) -> Any:
        states, last = rnn(*tensors, function=function)
        return states * 2, last + 1

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    expected, found = call(*inputs), compiled(*inputs)
    torch.testing.assert_close(found, expected)
    for got, want in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_compiled_code_takes_other_sizes() -> None:
    compiled = torch.compile(
        lambda *tensors: rnn(*tensors)[0], backend="aot_eager", fullgraph=True, dynamic=True
    )
    for time in (3, 5):
        inputs = draw("lstm", (2, time, 1, 4), torch.float32)
        torch.testing.assert_close(compiled(*inputs), rnn(*inputs)[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_autocast(function: Function) -> None:
    inputs = draw(function, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, last = rnn(*inputs, function=function)
        double = draw(function)
        assert rnn(*double, function=function)[0].dtype == torch.float64
    assert states.dtype == last.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in gradients([states.float()], inputs))
    assert error(states.float(), rnn(*inputs, function=function)[0]) < 2e-2


def test_mixed_dtypes_are_converted_to_the_inputs() -> None:
    wx, r, b, states = draw("lstm", dtype=torch.float32)
    out, last = rnn(wx.bfloat16(), r, b, states)
    assert out.dtype == last.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in gradients([out.float()], (wx, r, b, states)))


def test_deterministic_mode(deterministic: None) -> None:
    for function in FUNCTIONS:
        inputs = draw(function)
        one, other = (rnn(*inputs, function=function) for _ in range(2))
        assert torch.equal(one[0], other[0])
        for a, b in zip(gradients(one, inputs), gradients(other, inputs), strict=True):
            assert torch.equal(a, b)


# --- What it refuses --------------------------------------------------------------------------


def _with(**changes: Any) -> dict[str, Any]:
    wx, r, b, states = draw("lstm", grad=False, dtype=torch.float32)
    return {"Wx": wx, "R": r, "b": b, "states": states, **changes}


@pytest.mark.parametrize(
    ("changes", "error_type", "words"),
    [
        ({"Wx": [1]}, TypeError, "Wx must be a torch.Tensor, not list"),
        ({"R": None}, TypeError, "R must be a torch.Tensor, not NoneType"),
        ({"b": torch.zeros(4, 2, 4, dtype=torch.int64)}, TypeError, "b has dtype torch.int64"),
        ({"R": torch.zeros(4, 2, 4, 4).double()}, TypeError, "float64 does not mix"),
        (
            {"Wx": torch.zeros(3, 5, 4, 2, 4).to_sparse()},
            TypeError,
            r"Wx is sparse; .* so pass Wx.to_dense\(\)",
        ),
        ({"Wx": torch.zeros(3, 5, 3, 2, 4)}, ValueError, r"\(batch, time, 4, heads, units\)"),
        ({"R": torch.zeros(3, 2, 4, 4)}, ValueError, r"R has shape \(3, 2, 4, 4\)"),
        ({"b": torch.zeros(4, 2, 5)}, ValueError, r"must be \(4, 2, 4\)"),
        ({"states": torch.zeros(2, 3, 2, 4)}, ValueError, r"must be \(2, 3, 1, 2, 4\)"),
        ({"states": torch.zeros(2, 3, 1, 2, 4, device="meta")}, ValueError, "on one device"),
        ({"function": "rwkv"}, ValueError, "accepted are lstm, gru, elman, slstm"),
        ({"backend": "cudnn"}, ValueError, f"accepted are {', '.join(BACKENDS)}"),
        ({"backend": "cuda_fused"}, ValueError, "needs a CUDA device; Wx is on cpu"),
        ({"forward_clipval": -1.0}, ValueError, "forward_clipval is -1.0"),
        ({"gradient_recurrent_clipval": 0}, ValueError, "accepted are positive numbers, and None"),
        ({"gradient_recurrent_cut": 1}, TypeError, "gradient_recurrent_cut is 1"),
    ],
)
def test_errors(changes: dict[str, Any], error_type: type[Exception], words: str) -> None:
    with pytest.raises(error_type, match=words):
        rnn(**_with(**changes))
