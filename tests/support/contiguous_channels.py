"""Problems of contiguous channels for tests of kernels in an emulator, and memory in which a kernel's mistakes show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from scan_registry.kernels.linear_scan import cases
from scan_registry.kernels.linear_scan.problem import STRIDED, LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel, Variant

DIRECTIONS = ("forward", "backward")
#: Elements before and behind each tensor. They hold a number that no result has, or NaN.
AROUND, UNTOUCHED = 512, 77.0


def only_kernel(direction: str, access: str, dtype: str, **others: int) -> tuple[Kernel, Variant]:
    """A kernel, and its one variant of a dtype, an access and other static parameters."""
    kernel = FAMILY.kernel(f"channel_last_{direction}", "cuda")
    pins = {("access", access), ("dtype", dtype), *others.items()}
    (variant,) = (v for v in kernel.variants if pins <= {*v.statics})
    return kernel, variant


def surrounded(
    tensor: torch.Tensor, offset: int, around: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of ``around``, and in it a copy of the tensor with the same strides, so many elements off a boundary of 16
    bytes."""
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.full((extent + 2 * AROUND + offset,), around, dtype=tensor.dtype)
    placed = memory.as_strided(tensor.shape, tensor.stride(), AROUND + offset)
    placed.copy_(tensor)
    return memory, placed


@lru_cache(maxsize=128)
def solved(
    shape: cases.Shape, setting: cases.Setting, dtype: str, lengths: tuple[int, ...] = ()
) -> cases.Trial:
    """A problem for kernels of both directions and all tiles, as it takes longer to solve than to emulate one. ``lengths``: of
    packed sequences, without the last."""
    torch.manual_seed(sum(shape))
    if not setting.packed:
        return cases.draw(shape, setting, dtype, "cpu")
    bounds = torch.tensor([0, *lengths, shape[2] - sum(lengths)]).cumsum(0)
    with patch.object(cases, "random_cu_seqlens", lambda time: bounds):
        return cases.draw(shape, setting, dtype, "cpu")


def with_and_without_states(
    each: Iterable[Any], turn: int, every: bool
) -> Iterator[tuple[int, Any, bool]]:
    """Triples of a number, one of ``each``, and whether it is to be solved with states. ``every``: both with and without. Else
    one way, which alternates, and is the other one where ``turn`` is odd instead of even."""
    for number, (one, states) in enumerate(product(each, (True, False))):
        if every or (number // 4 + number + turn) % 2 == 0:
            yield number, one, states


def keeps_to_its_memory(
    kernel: Kernel,
    variant: Variant,
    library: Any,
    problems: Iterable[tuple[int, cases.Shape, bool]],
    tolerance: float,
) -> None:
    """Runs a variant in the emulator on numbered problems of shapes, with states or without, in both directions of time: the
    results are right, and nothing beside them changes."""
    dtype = variant.text("dtype")
    for seed, shape, states in problems:
        setting = cases.Setting(states=states, reverse=bool(seed % 4 // 2) ^ states)
        case = solved(shape, setting, dtype).case(kernel.name, aligned=True)
        tensors, memories = dict(case.tensors), []
        for name, tensor in case.tensors.items():
            if tensor is not None and tensor.dim() == 4:
                memory, tensors[name] = surrounded(tensor, 0, UNTOUCHED)
                memories += [memory] if name in case.expected else []
        library.run(case.problem, tensors, seed)
        assert replace(case, tensors=tensors).error() <= tolerance, (shape, setting)
        for name in case.expected:
            tensors[name].fill_(UNTOUCHED)
        assert all(bool((memory == UNTOUCHED).all()) for memory in memories), (shape, setting)


def posed(
    case: str,
    direction: str = "forward",
    alignment: int = 16,
    gate_stride: int | None = None,
    sequences: int = 0,
) -> LinearScanProblem:
    """The problem of a case of contiguous channels: "batch,time,channels:dtype"."""
    sizes, dtype = case.split(":")
    batch, time, channels = map(int, sizes.split(","))
    rows = Strides(0, channels * time, 1, channels)
    gates = rows if gate_stride is None else replace(rows, batch=0, time=gate_stride)
    others = (rows,) * (len(STRIDED[direction]) - 2)  # type: ignore[index]
    return LinearScanProblem(
        *(direction, "channel_last", dtype, dtype),  # type: ignore[arg-type]
        *(1, batch, channels, time),
        strides=(gates, *others, Strides(0, channels, 1, 0)),
        alignment=alignment,
        sequences=sequences,
    )


def is_taken(kernel: Kernel, variant: Variant, problem: LinearScanProblem) -> bool:
    """Whether a variant takes a problem. It is then the one that is chosen of all the kernel's."""
    taking = [v for v in kernel.variants if kernel.rules.accepts(v, problem) is None]
    accepts = variant in taking
    assert (min(taking, key=lambda v: kernel.cost(v, problem)) == variant) == accepts
    return accepts
