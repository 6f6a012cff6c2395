"""The operator ``rnn`` on the CPU: what it computes, its derivatives, its options, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import Call, OperatorTests, arguments_of
from recurring import draw, error, gradients, plainly
from torch import Tensor

from scan_registry import rnn
from scan_registry.kernels.rnn.op.arguments import BACKENDS, FUNCTIONS
from scan_registry.kernels.rnn.problem import SIZES, Function

OP = torch.ops.scan_registry.rnn.default
BACKWARD_OP = torch.ops.scan_registry.rnn_backward.default
NO_CLIPS = (math.inf, math.inf, False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class TestRnn(OperatorTests):
    """Each function by itself, with each option in turn."""

    cases = {
        **{function: {"function": function} for function in FUNCTIONS},
        **{f"{function}, resets": {"function": function, "reset": True, "anew": n % 2 == 0, "state": True} for n, function in enumerate(FUNCTIONS)},
        **{f"{function}, packed": {"function": function, "packed": True, "state": n % 2 == 0} for n, function in enumerate(FUNCTIONS)},
        "lstm, state": {"function": "lstm", "state": True},
        "gru, state, no bias": {"function": "gru", "state": True, "bias": False},
        "elman, resets to zero": {"function": "elman", "reset": True},
        "slstm, state": {"function": "slstm", "state": True},
        "lstm, packed, resets": {"function": "lstm", "packed": True, "state": True, "reset": True, "anew": True},
        "gru, packed, resets": {"function": "gru", "packed": True, "reset": True},
    }  # fmt: skip
    few = ("lstm, state", "slstm, resets", "gru, packed")
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        torch.float16: 5e-3,
        torch.bfloat16: 2e-2,
    }
    #: Batch, time, heads and units.
    sizes = ((2, 12, 2, 8), (3, 5, 2, 4), (3, 1, 2, 6))
    small = (2, 5, 2, 3)
    large = (20, 30, 2, 64)
    empty = ((0, 5, 2, 4), (3, 0, 2, 4), (3, 5, 0, 4))
    initial = ("states", "reset_states")
    packing = ("cu_seqlens", "max_seqlen")
    spoilt = ()  # R is not read where there is no state yet
    maps = ("reset",)
    keeps = False
    same_bits = False
    autocasts = True

    def draw(self, case: str, size: Any, dtype: torch.dtype) -> Call:
        spec = self.cases[case]
        function = spec["function"]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        wx, r, b, _ = (t.detach() for t in draw(function, size, wide))
        batch, time, heads, dim = size
        bounds = [0, 0, time // 3, time // 3 + min(1, time // 2), time]
        sequences = len(bounds) - 1 if spec.get("packed") else 1
        of_state = len(SIZES[function].states), batch, sequences, heads, dim
        tensors = {"Wx": wx / 2, "R": r / 2}
        if spec.get("bias", True):
            tensors["b"] = b / 2
        if spec.get("state"):
            tensors["states"] = torch.rand(of_state, dtype=wide) * 3
        if spec.get("anew"):
            tensors["reset_states"] = torch.rand(of_state, dtype=wide) + 1
        marks = torch.rand(batch, time) < 0.3
        if marks.numel():
            marks[0, 0] = marks[-1, -1] = True
        others = {
            "function": function,
            "reset": marks if spec.get("reset") else None,
            "cu_seqlens": torch.tensor(bounds) if spec.get("packed") else None,
            "max_seqlen": time if spec.get("packed") else None,
            **({} if "b" in tensors else {"b": None}),
        }
        return Call({name: t.to(dtype) for name, t in tensors.items()}, others)

    def run(self, **arguments: Any) -> tuple[Tensor, ...]:
        return rnn(**arguments)

    def right(self, **arguments: Any) -> tuple[Tensor, ...]:
        """Each packed sequence by itself, in the formulas."""
        wx, r, b, states, reset, anew, bounds = (
            arguments.get(n)
            for n in ("Wx", "R", "b", "states", "reset", "reset_states", "cu_seqlens")
        )
        function = arguments["function"]
        if b is None:
            b = r.new_zeros(SIZES[function].bias, *r.shape[1:3])
        ends: list[int] = [0, wx.shape[1]] if bounds is None else bounds.tolist()
        count = len(SIZES[function].states)
        parts, finals = [], []
        for number, (begin, end) in enumerate(pairwise(ends)):
            own = None if states is None else states[:, :, number : number + 1]
            fresh = None if anew is None else anew[:, :, number : number + 1]
            if begin == end:
                zeros = wx.new_zeros(count, wx.shape[0], 1, *wx.shape[3:])
                finals.append(zeros if own is None else own)
                continue
            marks = None if reset is None else reset[:, begin:end]
            parts.append(plainly(function, wx[:, begin:end], r, b, own, marks, fresh))
            finals.append(parts[-1][:, :, -1:])
        nothing = wx.new_zeros(count, *wx.shape[:2], *wx.shape[3:])
        return torch.cat(parts, 2) if parts else nothing, torch.cat(finals, 2)

    def slack(self, name: str, out: Tensor, dtype: torch.dtype) -> float:
        exact = out.dtype == torch.float32 and "output" in name
        return 2e-6 if exact else super().slack(name, out, dtype)

    def on_gpu(self, call: Call) -> bool:
        return call.others["cu_seqlens"] is None

    def time(self, call: Call, name: str) -> int | None:
        return {"Wx": 1, "reset": 1, "output 0": 2}.get(name)

    def state(self, call: Call, states: Tensor, number: int) -> Tensor:
        return states.narrow(2, number, 1)

    def states(self, call: Call, each: list[Tensor]) -> Tensor:
        return torch.cat(each, 2)

    def checks(self, case: str) -> Iterator[Any]:
        few_steps = (2, 2, 1, 3)  # as they are traced one by one
        call = self.draw(case, few_steps, torch.float32)
        if call.others["cu_seqlens"] is not None:
            return
        small = ("test_schema", "test_faketensor", "test_autograd_registration")
        tensors = [
            t if t is None or n < 3 or t.dtype == torch.bool else t.squeeze(2)
            for n, t in enumerate(
                arguments_of(call, "Wx", "R", "b", "states", "reset", "reset_states")
            )
        ]
        how = call.others["function"], "auto", *NO_CLIPS
        yield OP, (*tensors, *how, False), small[:2]
        every, last, cache = OP(*tensors, *how, True)
        leaves = [
            t if t is None or t.dtype == torch.bool else t.clone().requires_grad_() for t in tensors
        ]
        yield (
            OP,
            (*leaves, *how, True),
            (*small, "test_aot_dispatch_dynamic")[: 4 if how[0] == "lstm" else 3],
        )
        _, r, _, start, reset, anew = tensors
        back = r, every, start, reset, anew, cache, torch.randn_like(every), torch.randn_like(last)
        yield BACKWARD_OP, (*back, *how), small

    refused = {
        "list": ({"Wx": [1]}, TypeError, "Wx must be a torch.Tensor, not list"),
        "none": ({"R": None}, TypeError, "R must be a torch.Tensor, not NoneType"),
        "integers": ({"b": torch.zeros(4, 2, 3).long()}, TypeError, "b has dtype torch.int64"),
        "mix": ({"R": torch.zeros(4, 2, 3, 3).double()}, TypeError, "float64 does not mix"),
        "sparse": ({"Wx": torch.zeros(2, 5, 4, 2, 3).to_sparse()}, TypeError, r"Wx is sparse; .* so pass Wx.to_dense\(\)"),
        "gates": ({"Wx": torch.zeros(2, 5, 3, 2, 3)}, ValueError, r"\(batch, time, 4, heads, units\)"),
        "R": ({"R": torch.zeros(3, 2, 3, 3)}, ValueError, r"R has shape \(3, 2, 3, 3\)"),
        "b": ({"b": torch.zeros(4, 2, 5)}, ValueError, r"must be \(4, 2, 3\)"),
        "states": ({"states": torch.zeros(2, 2, 2, 3)}, ValueError, r"must be \(2, 2, 1, 2, 3\)"),
        "device": ({"states": torch.zeros(2, 2, 1, 2, 3, device="meta")}, ValueError, "on one device"),
        "function": ({"function": "rwkv"}, ValueError, "accepted are lstm, gru, elman, slstm"),
        "backend": ({"backend": "cudnn"}, ValueError, f"accepted are {', '.join(BACKENDS)}"),
        "cuda": ({"backend": "cuda_fused"}, ValueError, "needs a CUDA device; Wx is on cpu"),
        "clip": ({"forward_clipval": -1.0}, ValueError, "forward_clipval is -1.0"),
        "clip of 0": ({"gradient_recurrent_clipval": 0}, ValueError, "accepted are positive numbers, and None"),
        "cut": ({"gradient_recurrent_cut": 1}, TypeError, "gradient_recurrent_cut is 1"),
        "reset": ({"reset": [True]}, TypeError, "reset must be a torch.Tensor, not list"),
        "reset's dtype": ({"reset": torch.zeros(2, 5)}, TypeError, "reset has dtype torch.float32; accepted is bool"),
        "reset's shape": ({"reset": torch.zeros(5, 2) > 0}, ValueError, r"reset has shape \(5, 2\); it must be \(2, 5\)"),
        "no reset": ({"reset_states": torch.zeros(2, 2, 1, 2, 3)}, ValueError, "given without reset"),
        "reset states": (
            {"reset": torch.zeros(2, 5) > 0, "reset_states": torch.zeros(2, 2, 2, 3)},
            ValueError,
            r"reset_states has shape \(2, 2, 2, 3\).* must be \(2, 2, 1, 2, 3\)",
        ),
        "bounds": ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens must be a torch.Tensor, not list"),
        "bounds' dtype": ({"cu_seqlens": torch.tensor([0.0, 5])}, TypeError, "accepted are int32 and int64"),
        "bounds' values": ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "it must rise from 0 to the 5 steps"),
        "packed states": (
            {"cu_seqlens": torch.tensor([0, 2, 5]), "states": torch.zeros(2, 2, 1, 2, 3)},
            ValueError,
            r"with 2 packed sequences it must be \(2, 2, 2, 2, 3\)",
        ),
        "length": ({"max_seqlen": 5}, ValueError, "max_seqlen is given without cu_seqlens"),
        "short length": (
            {"cu_seqlens": torch.tensor([0, 2, 5]), "max_seqlen": 2},
            ValueError,
            "max_seqlen is 2, and the longest sequence in cu_seqlens has 3 steps",
        ),
        **{
            f"length {n}": ({"cu_seqlens": torch.tensor([0, 5]), "max_seqlen": n}, TypeError, "must be an int")
            for n in (2.5, True)
        },
    }  # fmt: skip


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


@pytest.mark.parametrize(
    "option", [{"gradient_recurrent_clipval": 1.0}, {"gradient_recurrent_cut": True}]
)
def test_what_is_clipped_has_no_second_derivative(option: dict[str, Any]) -> None:
    inputs = draw("lstm")
    states, _ = rnn(*inputs, **option)
    with pytest.raises(RuntimeError, match="create_graph does not go with them"):
        torch.autograd.grad(states.sum(), inputs, create_graph=True)


def test_mixed_dtypes_are_converted_to_the_inputs() -> None:
    wx, r, b, states = draw("lstm", dtype=torch.float32)
    out, last = rnn(wx.bfloat16(), r, b, states)
    assert out.dtype == last.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in gradients([out.float()], (wx, r, b, states)))


def test_what_is_clipped_does_not_go_with_transforms() -> None:
    wx, *others = (t.detach() for t in draw("lstm"))
    with pytest.raises(ValueError, match=r"do not go with torch\.func"):
        torch.func.grad(lambda x: rnn(x, *others, forward_clipval=1)[0].sum())(wx)
