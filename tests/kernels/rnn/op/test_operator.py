"""``rnn`` on its own CUDA kernels, emulated on the CPU: what the operator passes is what they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from planning import forget_plans
from posing import best
from torch import Tensor

from scan_registry import rnn
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.model import Problem
from scan_registry.kernels.rnn.op import plans as rnn_plans
from scan_registry.kernels.rnn.op.buffers import BufferPool
from scan_registry.kernels.rnn.problem import SIZES, Function, RnnProblem
from scan_registry.kernels.rnn.spec import FAMILY
from scan_registry.ops.launching import PlanCache, Run

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, cuda_emulator: ModuleType, tmp_path: Path) -> Any:
    """Has CPU tensors taken for a GPU's, and problems of one scope given to the emulator."""

    def start(scope: str) -> None:
        def prepared(
            posed: Sequence[tuple[Problem, Backend]], device: torch.device
        ) -> tuple[RnnProblem, Run]:
            (problem,) = (
                problem
                for problem, _ in posed
                if isinstance(problem, RnnProblem) and problem.scope == scope
            )
            kernel = FAMILY.kernel(problem.kernel, "cuda")
            variant = best(kernel, problem)
            library = cuda_emulator.emulated(kernel, variant, tmp_path)

            def run(tensors: Mapping[str, Tensor | None]) -> None:
                library.run(problem, tensors, 0)

            return problem, run

        monkeypatch.setattr(rnn_plans, "_in_torch", lambda *_: False)
        monkeypatch.setattr(rnn_plans, "_prepared", prepared)
        monkeypatch.setattr(rnn_plans, "plan_cache", PlanCache())
        forget_plans(monkeypatch, "rnn")
        monkeypatch.setattr(rnn_plans, "rnn_buffers", BufferPool())

    return start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "function", "dtype"),
    [
        pytest.param(
            *(scope, function, [*TOLERANCE][(n // 2 + turn) % 2]),
            marks=[pytest.mark.thorough] if (n + turn) % 2 else [],
        )
        for turn, scope in enumerate(("sequence", "step"))
        for n, function in enumerate(SIZES)
    ],
    ids=str,
)
def test_matches_plain_torch(play: Any, scope: str, function: Function, dtype: torch.dtype) -> None:
    """Results and gradients, with units that are padded and without, in any layout. Inputs do not saturate
    Elman's tanh, whose derivative 1 − h² has few right digits where h is rounded to almost 1."""
    torch.manual_seed(0)
    sizes = SIZES[function]
    drawn = []
    for dim, lead in ((16, (2, 7)), (5, (7, 2))):
        wx = torch.randn(*lead, sizes.inputs, 2, dim, dtype=dtype) / 2
        inputs = (
            wx if lead == (2, 7) else wx.transpose(0, 1),
            (torch.randn(sizes.recurrent, 2, dim, dim) / dim**0.5).to(dtype),
            torch.randn(sizes.bias, 2, dim, dtype=dtype) / 2,
            1 + torch.rand(len(sizes.states), 2, 1, 2, dim, dtype=dtype),
        )
        drawn.append(inputs)
    expected = [results([t.double() for t in inputs], function) for inputs in drawn]
    play(scope)
    for inputs, wanted in zip(drawn, expected, strict=True):
        for got, want in zip(results(inputs, function), wanted, strict=True):
            error = (got.double() - want).norm() / want.norm()
            assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("scope", "function"), [("sequence", "slstm"), ("step", "slstm"), ("step", "gru")]
)
def test_resets(play: Any, scope: str, function: Function) -> None:
    """In one launch and in one for each step, where a first reset hides states that are NaN."""
    torch.manual_seed(0)
    sizes = SIZES[function]
    reset = torch.rand(7, 2).T < 0.4
    reset[:, :3] = torch.tensor([[True, False, True], [False, False, False]])
    inputs = (
        torch.randn(2, 7, sizes.inputs, 1, 16),
        torch.randn(sizes.recurrent, 1, 16, 16) / 4,
        torch.randn(sizes.bias, 1, 16),
        1 + torch.rand(len(sizes.states), 2, 1, 1, 16),
    )
    inputs[3][:, 0] = torch.nan
    expected = results([t.double() for t in inputs], function, reset)
    play(scope)
    errors = [
        float((got.double() - want).norm() / want.norm())
        for got, want in zip(results(inputs, function, reset), expected, strict=True)
    ]
    assert all(error <= TOLERANCE[torch.float32] for error in errors), errors


def results(
    tensors: Sequence[Tensor], function: Function, reset: Tensor | None = None
) -> list[Tensor]:
    """h, the last states, and the gradients of all inputs from a loss of h and of these."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    states, last = rnn(*inputs, function=function, reset=reset)
    loss = (states[0] * torch.linspace(0, 1, 7).view(7, 1, 1)).double().sum() + last[
        0
    ].double().sum()
    return [states[0].detach(), last.detach(), *torch.autograd.grad(loss, inputs)]
