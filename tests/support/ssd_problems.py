"""Arguments of ``ssd_scan`` drawn at random, and what they are compared by."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.ssd_scan import reference

#: Names of the tensors that have derivatives, in the function's order.
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")


def draw(
    batch: int = 2,
    time: int = 20,
    heads: int = 4,
    size: int = 3,
    groups: int = 2,
    states: int = 5,
    sequences: int = 0,
    dtype: torch.dtype = torch.float64,
    wide_D: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Every tensor; ``x``, ``B``, ``C`` and ``z`` in ``dtype``, others in that of the computation."""
    wide = reference.compute_dtype(dtype)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    between = (sequences,) if sequences else ()
    return {
        "x": normal(batch, time, heads, size),
        "dt": normal(batch, time, heads, dtype=wide),
        "A": -normal(heads, dtype=wide).exp(),
        "B": normal(batch, time, groups, states),
        "C": normal(batch, time, groups, states),
        "D": normal(*((heads, size) if wide_D else (heads,)), dtype=wide),
        "z": normal(batch, time, heads, size),
        "dt_bias": normal(heads, dtype=wide),
        "initial_state": normal(batch, *between, heads, size, states, dtype=wide),
    }


def drawn_problem(seed: int) -> dict[str, Any]:
    """Of any kind: shapes, lengths up to 300, options, and tensors that are not there."""
    rng = random.Random(seed)
    groups = rng.choice([1, 1, 2, 3])
    packed = rng.random() < 0.5
    time = rng.choice([rng.randint(1, 20), rng.randint(1, 300)])
    sequences = rng.randint(1, 6) if packed else 0
    problem = draw(
        rng.randint(1, 2), time, groups * rng.randint(1, 3), rng.randint(1, 9), groups, rng.randint(1, 9),
        sequences, wide_D=rng.random() < 0.3, seed=seed,
    )  # fmt: skip
    for name in ("D", "z", "dt_bias", "initial_state"):
        if rng.random() < 0.3:
            del problem[name]
    problem["dt_softplus"] = rng.random() < 0.6
    if rng.random() < 0.4:
        problem["dt_limit"] = (0.1, 1.0)
    if packed:
        inner = sorted(rng.randint(0, time) for _ in range(sequences - 1))
        problem["cu_seqlens"] = torch.tensor([0, *inner, time], dtype=torch.int32)
    if rng.random() < 0.5:
        rows = [[rng.randint(0, 2) for _ in range(time)] for _ in range(problem["x"].shape[0])]
        problem["seq_idx"] = torch.tensor(rows).sort(1).values if rng.random() < 0.5 else torch.tensor(rows)  # fmt: skip
    return problem


def leaves_of(problem: dict[str, Any]) -> dict[str, Any]:
    """The same, of tensors that require gradients."""
    return {
        name: value.detach().clone().requires_grad_() if name in NAMES else value
        for name, value in problem.items()
    }


def gradients_of(function: Any, problem: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The output and the final state of ``function``, and gradients of the tensors."""
    leaves = leaves_of(problem)
    results = function(**leaves)
    generator = torch.Generator().manual_seed(1)
    # Numbers that every dtype holds.
    incoming = [torch.randn(t.shape, generator=generator).bfloat16().half().to(t) for t in results]
    tensors = [leaves[name] for name in NAMES if name in leaves]
    grads = torch.autograd.grad(results, tensors, incoming, materialize_grads=True)
    return [t.detach() for t in results], list(grads)
