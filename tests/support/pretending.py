"""Kernels of recurrent networks that read and write nothing but what their problem says, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.op import layer as rnn_layer
from scan_registry.kernels.rnn.op import plans as rnn_plans
from scan_registry.kernels.rnn.problem import SIZES, RnnProblem
from scan_registry.nn import torch_cells
from scan_registry.ops.call import fast_path


class SequenceKernel:
    """All steps of a problem, of tensors by their addresses alone: their shapes are the problem's."""

    def __init__(self, problem: RnnProblem) -> None:
        self.problem, self.sizes, self.scalars = problem, SIZES[problem.function], problem.scalars()
        self.unit = problem.heads, problem.dim

    def dense(self, tensors: Mapping[str, Any], name: str, *lead: int) -> Any:
        """What has no gaps, (*lead, N, D)."""
        given = tensors[name]
        if given is None:
            return None
        self.check(given, name)
        shape = torch.Size((*lead, *self.unit))
        model = torch.empty(shape, device="meta")
        assert given.untyped_storage().nbytes() >= shape.numel() * given.element_size()
        return given.as_strided(shape, model.stride())

    def strided(self, tensors: Mapping[str, Any], name: str, count: int) -> Tensor:
        """(count, B, T, N, D), with the strides of the problem."""
        problem, (heads, dim) = self.problem, self.unit
        given: Tensor = tensors[name]
        self.check(given, name)
        along = [self.scalars[f"{name}_{each}"] for each in ("batch", "time")]
        between = self.scalars.get(f"{name}_state", heads * dim)
        shape = [count, problem.batch, problem.time, heads, dim]
        return given.as_strided(shape, [between, *along, dim, 1])

    def marks(self, tensors: Mapping[str, Any]) -> Any:
        """Where states start anew, (B, T)."""
        given, problem = tensors["reset"], self.problem
        assert (given is not None) == problem.resets
        if given is None:
            return None
        assert given.dtype == torch.bool
        assert given.untyped_storage().nbytes() >= problem.batch * problem.time
        return given.as_strided((problem.batch, problem.time), (problem.time, 1))

    def check(self, tensor: Tensor, name: str) -> None:
        assert tensor.data_ptr() % 16 == 0, name
        dtype = "float32" if name == "bias" else self.problem.dtype
        assert str(tensor.dtype) == f"torch.{dtype}", name

    def __call__(self, tensors: Mapping[str, Any]) -> None:
        getattr(self, self.problem.direction)(tensors)

    def forward(self, tensors: Mapping[str, Any]) -> None:
        problem, sizes = self.problem, self.sizes
        count, dim = len(sizes.states), problem.dim
        states, cache = reference.forward(
            problem.function,
            self.strided(tensors, "inputs", sizes.inputs).permute(1, 2, 0, 3, 4),
            self.dense(tensors, "recurrent", sizes.recurrent * dim).view(
                sizes.recurrent, problem.heads, dim, dim
            ),
            self.dense(tensors, "bias", sizes.bias),
            self.dense(tensors, "initial", count, problem.batch),
            problem.clips,
            self.marks(tensors),
        )
        self.strided(tensors, "states", count).copy_(states)
        assert (tensors["cache"] is not None) == (problem.training and bool(sizes.cache))
        if tensors["cache"] is not None:
            self.strided(tensors, "cache", len(sizes.cache)).copy_(cache.permute(2, 0, 1, 3, 4))

    def backward(self, tensors: Mapping[str, Any]) -> None:
        problem, sizes = self.problem, self.sizes
        count, dim = len(sizes.states), problem.dim
        states = self.strided(tensors, "states", count)
        grads = torch.zeros_like(states)
        if problem.graded:
            grads[: problem.graded] = self.strided(tensors, "states_grad", problem.graded)
        else:
            assert tensors["states_grad"] is None
        cache = self.strided(tensors, "cache", len(sizes.cache)) if sizes.cache else states[:0]
        gates_grad, initial_grad = reference.backward(
            problem.function,
            self.dense(tensors, "recurrent", sizes.recurrent * dim).view(
                sizes.recurrent, problem.heads, dim, dim
            ),
            states,
            self.dense(tensors, "initial", count, problem.batch),
            cache.permute(1, 2, 0, 3, 4),
            grads,
            self.dense(tensors, "final_grad", count, problem.batch),
            problem.clips,
            reset=self.marks(tensors),
        )
        self.strided(tensors, "gates_grad", sizes.bias).copy_(gates_grad.permute(2, 0, 1, 3, 4))
        self.dense(tensors, "initial_grad", count, problem.batch).copy_(initial_grad)


#: Problems that were solved, with the tensors that the kernel was given.
Runs = list[tuple[RnnProblem, dict[str, Any]]]


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Has layers take CPU tensors for a GPU's. Lists what kernels are given from then on."""
    runs: Runs = []

    def prepared(posed: Any, device: torch.device) -> Any:
        problem, _ = posed[0]
        assert problem.scope == "sequence"
        kernel = SequenceKernel(problem)

        def run(tensors: Any) -> None:
            runs.append((problem, dict(tensors)))
            kernel(tensors)

        return problem, run

    monkeypatch.setattr(rnn_plans, "_prepared", prepared)
    monkeypatch.setattr(rnn_layer, "on_gpu", lambda tensor: True)
    monkeypatch.setattr("scan_registry.nn.recurrent.on_gpu", lambda tensor: True)
    monkeypatch.setattr(rnn_layer, "_fast", fast_path(rnn_layer._plan_call))
    monkeypatch.setattr(torch_cells, "takes", lambda *_: False)  # which are the CPU's
    torch.manual_seed(0)
    return runs


def flat(results: Any) -> list[Tensor]:
    """The tensors in nested tuples and lists."""
    return [results] if isinstance(results, Tensor) else [t for r in results for t in flat(r)]
