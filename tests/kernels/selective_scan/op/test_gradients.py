"""How gradients are made of what selective_scan's kernels write, without any kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scan_registry.kernels.selective_scan.op.arguments import Arguments, Options, normalised
from scan_registry.kernels.selective_scan.op.gradients import (
    GradientBuffers,
    finisher,
    shared_shape,
)
from scan_registry.kernels.selective_scan.op.problems import make_problem

NAMES = ("A_grad", "B_grad", "C_grad", "D_grad", "bias_grad")
PLACES = (2, 3, 4, 5, 7)


class Counting(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def arguments(
    batch: int, channels: int, dtype: torch.dtype, rank: int = 4, only: str = "D and bias"
) -> tuple[Arguments, Arguments]:
    """As they were given, and as the operator takes them."""
    time, states = 8, 3
    of_projection = (batch, 1, states, time) if rank == 4 else (batch, states, time)
    given = Arguments(
        torch.zeros(batch, channels, time, dtype=dtype),
        torch.zeros(batch, channels, time, dtype=dtype),
        torch.zeros(channels, states),
        *torch.zeros(2, *of_projection, dtype=dtype),
        torch.zeros(channels) if "D" in only else None,
        None,
        torch.zeros(channels) if "bias" in only else None,
        None,
        None,
    )
    return given, normalised(*given, True, "auto")


def made(
    given: Arguments, taken: Arguments, parts: int
) -> tuple[dict[str, Tensor | None], dict[str, Tensor], list[str]]:
    """The gradients, the terms that they were made of, and the operators that were called."""
    others = {"grad": taken.u, "u_grad": taken.u}
    problem = replace(make_problem("backward", taken, Options(True), others, 0), parts=parts)
    buffers = GradientBuffers(taken, problem, shared_shape(taken, problem, given))
    wanted = (*(t is not None for t in taken.differentiable),)
    finish = finisher(taken, problem, wanted, given, buffers)
    tensors: dict[str, Any] = {}
    sums = buffers.put(tensors)
    terms = buffers.views(sums)
    torch.manual_seed(0)
    for name, each in terms.items():
        assert tensors[name].data_ptr() == each.data_ptr()
        each.normal_()
    with Counting() as counting:
        found = finish(tensors, sums)
    gradients = {name: found[place] for name, place in zip(NAMES, PLACES, strict=True)}
    return gradients, terms, counting.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("only", ["D and bias", "D", "bias", "none"])
@pytest.mark.parametrize(("batch", "channels", "parts"), [(1, 8, 1), (2, 8, 3), (2, 150, 1)])
def test_gradients_are_the_sums(
    batch: int, channels: int, parts: int, only: str, rank: int, dtype: torch.dtype
) -> None:
    given, taken = arguments(batch, channels, dtype, rank, only)
    gradients, terms, _ = made(given, taken, parts)
    shapes = dict(zip(NAMES, (taken.differentiable[n] for n in PLACES), strict=True))
    for name, gradient in gradients.items():
        like = shapes[name] if name[0] not in "BC" else getattr(given, name[0])
        if like is None:
            assert gradient is None
            continue
        assert gradient is not None
        assert (gradient.shape, gradient.dtype) == (like.shape, like.dtype), name
        total = terms[name].double()
        total = total.sum(0) if total.dim() > like.dim() else total
        torch.testing.assert_close(gradient.double(), total, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "channels", "dtype", "calls"),
    [
        (1, 8, torch.float32, ["unbind", "unbind"]),
        (1, 8, torch.bfloat16, ["copy_", "unbind", "unbind"]),
        (2, 150, torch.float32, ["sum", "sum", "unbind", "sum", "unbind"]),
        (2, 150, torch.bfloat16, ["sum", "sum", "copy_", "unbind", "sum", "unbind"]),
    ],
)
@pytest.mark.parametrize("rank", [3, 4])
def test_few_operators_are_called(
    batch: int, channels: int, dtype: torch.dtype, calls: list[str], rank: int
) -> None:
    """Each takes some microseconds, which short kernels do not hide."""
    _, _, names = made(*arguments(batch, channels, dtype, rank), 1)
    assert [name for name in names if "empty" not in name] == calls
