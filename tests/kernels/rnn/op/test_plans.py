"""How ``rnn`` calls its kernels: in one launch and step by step, with kernels of torch that read and write
nothing but what the problem's strides and sizes say."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from planning import forget_plans
from pretending import SequenceKernel
from torch import Tensor

from scan_registry import nn, rnn
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.model import Problem
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.op import buffers as step_buffers
from scan_registry.kernels.rnn.op import plans as rnn_plans
from scan_registry.kernels.rnn.op import steps as rnn_steps
from scan_registry.kernels.rnn.op.arguments import FUNCTIONS
from scan_registry.kernels.rnn.op.buffers import BufferPool
from scan_registry.kernels.rnn.problem import SIZES, Function, RnnProblem
from scan_registry.nn import torch_cells
from scan_registry.ops.launching import PlanCache, Run

Tensors = Mapping[str, Any]
Play = Callable[[str], list[RnnProblem]]


class Kernel(SequenceKernel):
    """Plays the kernel of a problem, which may be of one step."""

    def view(self, tensors: Tensors, name: str, count: int) -> Tensor:
        """A tensor of one step by its address, as a kernel sees it: (count, B, N, D)."""
        heads, dim = self.unit
        between = self.scalars.get(f"{name}_state", heads * dim)
        strides = [between, self.scalars[f"{name}_batch"], dim, 1]
        view: Tensor = tensors[name].as_strided([count, self.problem.batch, heads, dim], strides)
        return view

    def __call__(self, tensors: Tensors) -> None:
        problem = self.problem
        if problem.scope == "sequence":
            super().__call__(tensors)
        else:
            getattr(self, f"step_{problem.direction}")(tensors, problem.function)

    def step_forward(self, tensors: Tensors, function: Function) -> None:
        sizes, problem = self.sizes, self.problem
        unit = problem.heads, problem.dim
        terms = tensors["terms"].view(unit[0], problem.batch, sizes.recurrent, unit[1])
        made = reference.step(
            function,
            self.view(tensors, "inputs", sizes.inputs).transpose(0, 1).float(),
            terms.permute(1, 2, 0, 3).float(),
            tensors["bias"],
            tensors["carry"].unbind(0),
            problem.clips.forward,
        )
        states = torch.stack(tuple(made.states))
        tensors["carry"].copy_(states)
        self.view(tensors, "states", len(sizes.states)).copy_(states)
        assert (tensors["cache"] is not None) == (problem.training and bool(sizes.cache))
        if tensors["cache"] is not None:
            self.view(tensors, "cache", len(sizes.cache)).copy_(torch.stack(tuple(made.cache)))

    def step_backward(self, tensors: Tensors, function: Function) -> None:
        sizes, count, clips = self.sizes, len(self.sizes.states), self.problem.clips
        grads = tensors["carry"].clone()
        grads += self.view(tensors, "states_grad", count)
        terms = tensors["terms"].transpose(0, 1).float()
        grads[0] += terms.clamp(-clips.recurrent, clips.recurrent)
        cache = self.view(tensors, "cache", len(sizes.cache)).float() if sizes.cache else ()
        made = reference.step_back(
            function,
            tuple(cache),
            tuple(self.view(tensors, "before", count).float()),
            tuple(self.view(tensors, "states", count).float()),
            grads.unbind(0),
        )
        self.view(tensors, "gates_grad", sizes.bias).copy_(torch.stack(tuple(made.gates)))
        tensors["carry"].copy_(torch.stack(tuple(made.states)))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Has CPU tensors taken for a GPU's, with kernels of one scope, and lists the problems solved."""

    def start(scope: str) -> list[RnnProblem]:
        solved: list[RnnProblem] = []

        def prepared(
            posed: Sequence[tuple[Problem, Backend]], device: torch.device
        ) -> tuple[RnnProblem, Run]:
            problems = [problem for problem, _ in posed]
            (problem,) = (p for p in problems if isinstance(p, RnnProblem) and p.scope == scope)
            solved.append(problem)
            return problem, Kernel(problem)

        monkeypatch.setattr(rnn_plans, "_in_torch", lambda *_: False)
        monkeypatch.setattr(torch_cells, "takes", lambda *_: False)
        monkeypatch.setattr(rnn_plans, "_prepared", prepared)
        monkeypatch.setattr(rnn_plans, "plan_cache", PlanCache())
        forget_plans(monkeypatch, "rnn")
        pool = BufferPool()
        monkeypatch.setattr(rnn_plans, "rnn_buffers", pool)
        monkeypatch.setattr(step_buffers, "rnn_buffers", pool)
        return solved

    torch.manual_seed(0)
    return start


def draw(function: Function, shape: tuple[int, int, int, int]) -> tuple[Tensor, ...]:
    batch, time, heads, dim = shape
    sizes = SIZES[function]
    drawn = (
        torch.randn(batch, time, sizes.inputs, heads, dim),
        torch.randn(sizes.recurrent, heads, dim, dim) / dim**0.5,
        torch.randn(sizes.bias, heads, dim),
        torch.rand(len(sizes.states), batch, 1, heads, dim) * 3,
    )
    return tuple(tensor.requires_grad_() for tensor in drawn)


def results(inputs: Sequence[Tensor], weights: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Of ``rnn``: states and last ones, and the gradients of all inputs."""
    outs = rnn(*inputs, **options)
    loss = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
    assert isinstance(loss, Tensor)
    return [*outs, *torch.autograd.grad(loss, inputs)]


#: The third has a chunk of steps and some more, if a chunk is CHUNK_HERE steps.
CHUNK_HERE = 4
SHAPES = [(3, 3, 2, 16), (1, 1, 1, 16), (2, CHUNK_HERE + 2, 1, 32), (2, 3, 3, 5)]
CLIPS: list[dict[str, Any]] = [
    {},
    {"forward_clipval": 0.1, "gradient_recurrent_clipval": 0.05},
    {"gradient_recurrent_cut": True},
]


@pytest.mark.parametrize(
    ("function", "shape", "clips"),
    [
        # Each function with each shape and each clip, and each shape with each clip.
        *(
            (function, shape, CLIPS[(k + j) % 3])
            for k, function in enumerate(FUNCTIONS)
            for j, shape in enumerate(SHAPES)
        ),
        ("lstm", (1, rnn_steps.CHUNK + 1, 1, 16), CLIPS[1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("scope", ["sequence", "step"])
def test_results_and_gradients(
    play: Play,
    scope: str,
    function: Function,
    shape: Any,
    clips: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shape in SHAPES:
        monkeypatch.setattr(rnn_steps, "CHUNK", CHUNK_HERE)
    inputs = draw(function, shape)
    starts = [inputs, inputs[:3]]
    weights = [torch.randn_like(out) for out in rnn(*inputs, function=function)]
    expected = [results(given, weights, function=function, **clips) for given in starts]
    solved = play(scope)
    for given, wanted in zip(starts, expected, strict=True):
        found = results(given, weights, function=function, **clips)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert got.stride() == want.stride()
    assert {problem.direction for problem in solved} == {"forward", "backward"}
    assert all(problem.dim % 16 == 0 for problem in solved)
    with torch.no_grad():
        states, _ = rnn(*inputs, function=function, **clips)
    torch.testing.assert_close(states, expected[0][0])
    assert solved[-1].training is False


@pytest.mark.parametrize("scope", ["sequence", "step"])
def test_how_tensors_lie(play: Play, scope: str) -> None:
    """No copy where the gates of a step are without gaps and lie at multiples of 16 bytes; the states lie
    as the inputs do."""
    function: Function = "gru"
    inputs = draw(function, (3, 5, 2, 16))
    wx = inputs[0].detach()
    weights = [torch.randn_like(out) for out in rnn(*inputs, function=function)]
    expected = results(inputs, weights, function=function)
    solved = play(scope)
    room = torch.zeros(3, 9, 3, 2, 16)
    views = {
        "time first": wx.transpose(0, 1).contiguous().transpose(0, 1),
        "gaps": room[:, 2:7].copy_(wx),
        "units apart": torch.stack([wx, wx], -1)[..., 0],
        "off the grid": torch.cat([wx.flatten(), wx.new_zeros(1)]).roll(1)[1:].view(wx.shape),
    }
    for name, view in views.items():
        given = (view.detach().requires_grad_(), *inputs[1:])
        found = results(given, weights, function=function)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        forward = next(problem for problem in solved[::-1] if problem.direction == "forward")
        strides = forward.scalars()
        if scope == "sequence":
            of_inputs = strides["inputs_batch"], strides["inputs_time"]
            assert of_inputs == (view.stride()[:2] if name != "units apart" else wx.stride()[:2])
            assert forward.alignment == 16
            assert (strides["states_time"] > strides["states_batch"]) == (name == "time first")


def test_a_plan_is_made_once(play: Play) -> None:
    inputs = draw("lstm", (3, 5, 2, 16))
    solved = play("sequence")
    for _ in range(3):
        rnn(*inputs)[0].sum().backward()
    assert len(solved) == 2
    rnn(*draw("lstm", (3, 6, 2, 16)))
    assert len(solved) == 3


def test_buffers_are_used_again(play: Play) -> None:
    play("step")
    for _ in range(3):
        rnn(*draw("lstm", (2, 3, 1, 16)))[0].sum().backward()
    kept = rnn_plans.rnn_buffers._idle
    assert {key.options[0] for key, _ in kept} == {"forward", "backward"}
    assert len(kept) == 2


def test_kept_buffers_have_a_bound(play: Play) -> None:
    play("step")
    pool = rnn_plans.rnn_buffers
    pool.max_size = 1 << 20
    for heads, function in product((1, 2, 3), FUNCTIONS):
        rnn(*draw(function, (2, 3, heads, 16)), function=function)
        assert 0 < pool.size <= 1 << 20
    held = pool.size
    assert (pool.clear(), pool.size) == (held, 0)
    pool.max_size = 0
    rnn(*draw("lstm", (2, 3, 1, 16)))
    assert pool.size == 0
    pool.max_size = np.int64(7)  # type: ignore[assignment]
    assert (pool.max_size, type(pool.max_size)) == (7, int)
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="accepted are whole numbers of bytes from 0 up"):
            pool.max_size = wrong  # type: ignore[assignment]


def test_calls_at_the_same_time_share_no_buffers(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two threads is in the middle of its first step when the other begins its own."""
    play("step")
    inputs = [[t.detach() for t in draw("lstm", (2, 5, 1, 16))] for _ in range(2)]
    inputs[1][0] = inputs[1][0] + 1
    expected = [rnn(*each)[0] for each in inputs]
    both, first = threading.Barrier(2, timeout=60), threading.local()
    plain = Kernel.step_forward

    def step(self: Kernel, tensors: Tensors, function: Function) -> None:
        if not hasattr(first, "done"):
            first.done = True
            both.wait()
        plain(self, tensors, function)

    monkeypatch.setattr(Kernel, "step_forward", step)
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(lambda each: rnn(*each)[0], inputs)]
    for out, ref in zip(found, expected, strict=True):
        assert torch.equal(out, ref)


def test_buffers_go_with_the_module_that_they_served(play: Play) -> None:
    play("step")
    modules = [nn.LSTM(3, 16), nn.LSTM(3, 5, bidirectional=True), nn.SLSTM(3, 16)]
    for module in modules:
        module(torch.randn(4, 2, 3))[0].sum().backward()
    del module
    for left in (4, 2, 0):
        modules.pop()
        gc.collect()
        assert len(rnn_plans.rnn_buffers._idle) == left


def test_buffers_that_a_failed_call_used_are_not_kept(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play("step")

    def fail(*_: Any) -> None:
        raise RuntimeError("as planned")

    monkeypatch.setattr(Kernel, "step_forward", fail)
    with pytest.raises(RuntimeError, match="as planned"):
        rnn(*draw("lstm", (2, 3, 1, 16)))
    assert rnn_plans.rnn_buffers.size == 0


def test_short_of_memory_a_call_is_tried_again_without_kept_buffers(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play("step")
    given = draw("lstm", (2, 3, 1, 16))
    expected, plain = rnn(*given)[0], Kernel.step_forward

    def full(self: Kernel, tensors: Tensors, function: Function) -> None:
        if rnn_plans.rnn_buffers.size:
            raise torch.OutOfMemoryError("as planned")
        plain(self, tensors, function)

    rnn(*draw("gru", (2, 3, 1, 16)), function="gru")  # what is in the way
    monkeypatch.setattr(Kernel, "step_forward", full)
    assert torch.equal(rnn(*given)[0], expected)
