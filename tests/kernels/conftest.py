"""The emulator of a GPU, for tests of CUDA kernels on machines without one; the recurrence by itself; one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from by_path import load
from torch import Tensor


@pytest.fixture(scope="session")
def cuda_emulator(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of that name, which keeps libraries where all workers of this run have them."""
    module: ModuleType = load(Path(__file__).with_name("cuda_emulator.py"))
    if module.compiler() is None:
        pytest.skip("g++ is not installed")
    base = tmp_path_factory.getbasetemp()
    several = "PYTEST_XDIST_WORKER" in os.environ  # each of which has a folder inside of the run's
    module.shared = (base.parent if several else base) / "emulated"
    module.shared.mkdir(exist_ok=True)
    return module


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _plainly(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None = None,
    *,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Tensor, Tensor]:
    gates, tokens = torch.broadcast_tensors(_wide(gates), _wide(tokens))
    dtype = torch.promote_types(gates.dtype, tokens.dtype)
    gates, tokens = gates.to(dtype), tokens.to(dtype)
    dim %= tokens.dim()
    bounds = [0, tokens.shape[dim]]
    of_state = [*tokens.shape[:dim], *tokens.shape[dim + 1 :]]
    if cu_seqlens is not None:
        bounds = torch.as_tensor(cu_seqlens).tolist()
        of_state.insert(dim, len(bounds) - 1)
    start = tokens.new_zeros(()) if initial_state is None else initial_state.to(dtype)
    start = start.expand(of_state)
    states = [start] * tokens.shape[dim]
    ends = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        x = start if cu_seqlens is None else start.select(dim, number)
        for t in reversed(range(begin, end)) if reverse else range(begin, end):
            x = gates.select(dim, t) * x + tokens.select(dim, t)
            states[t] = x
        ends.append(x)
    together = torch.stack(states, dim) if states else torch.zeros_like(tokens)
    return together, ends[0] if cu_seqlens is None else torch.stack(ends, dim)


@pytest.fixture(scope="session")
def plainly() -> Callable[..., tuple[Tensor, Tensor]]:
    """States and final states as the docstring of ``linear_scan`` has them: step by step in float64 or
    complex128, in operators that torch differentiates. Shares no code with the package."""
    return _plainly


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Deterministic algorithms, under which torch fills with NaN what it leaves uninitialised."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> None:
    """Tensors are small here. Tests of threads set their number themselves."""
    if request.node.get_closest_marker("gpu") is None:
        request.getfixturevalue("one_thread")
