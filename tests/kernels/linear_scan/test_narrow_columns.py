"""CUDA kernels of linear_scan over few contiguous channels whose rows start at any address, in an emulator of the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch
from contiguous_channels import only_kernel, posed

from scan_registry.kernels.linear_scan import cases
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.space import NARROW
from scan_registry.kernels.model import ITEM_SIZE, Kernel, Variant

#: Elements before and behind each tensor. They hold a number that no result has, or NaN.
AROUND, UNTOUCHED = 4096, 77.0
#: SMs of the GPU that launches are for.
SM_COUNT = 3
#: (batch, channels, time) and whether time runs backwards: several tiles, less than one, rows of less than 16 bytes, exactly two
#: tiles, and as many channels as there may be.
SHAPES = (
    ((2, 7, 700), False),
    ((3, 21, 50), True),
    ((2, 25, 130), False),
    ((1, 2, 2100), True),
    ((1, 3, 2), False),
    ((3, 21, 96), True),
    ((2, 32, 77), False),
)


def the_kernel(direction: str) -> tuple[Kernel, Variant]:
    return only_kernel(direction, NARROW, "float32")


def surrounded(
    tensor: torch.Tensor, offset: int, around: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of ``around``, and in it a copy of (1, batch, channels, time) with contiguous channels, so many elements off a
    16-byte boundary."""
    memory = torch.full((tensor.numel() + 2 * AROUND + offset,), around, dtype=tensor.dtype)
    assert memory.data_ptr() % 16 == 0
    _, batch, channels, time = tensor.shape
    placed = memory[AROUND + offset :][: tensor.numel()].view(1, batch, time, channels).mT
    placed.copy_(tensor)
    return memory, placed


def scattered(
    case: cases.Case,
) -> tuple[LinearScanProblem, dict[str, torch.Tensor | None], list[torch.Tensor]]:
    """The problem and the tensors with each sequence at another offset, and the memory of the results."""
    problem, tensors, memories, offsets = case.problem, dict(case.tensors), [], count(1)
    for name, tensor in case.tensors.items():
        if tensor is None or tensor.dim() != 4 or tensor.shape[-1] != problem.time:
            continue
        is_result = name in case.expected
        memory, tensors[name] = surrounded(
            tensor, next(offsets) % 4, UNTOUCHED if is_result else torch.nan
        )
        if is_result:
            memories.append(memory)
    rows = Strides(0, problem.channels * problem.time, 1, problem.channels)
    strides = (*(rows,) * (len(problem.strides) - 1), problem.strides[-1])
    return replace(problem, strides=strides, alignment=4), tensors, memories


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_at_any_address(direction: str, cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """The results are right, and nothing beside them changes."""
    torch.manual_seed(0)
    kernel, variant = the_kernel(direction)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for seed, (shape, reverse) in enumerate(SHAPES):
        for states in (True, False):
            setting = cases.Setting(states=states, reverse=reverse ^ (not states))
            case = cases.draw(shape, setting, "float32", "cpu").case(kernel.name, aligned=True)
            problem, tensors, memories = scattered(case)
            library.run(problem, tensors, seed, SM_COUNT)
            ran = replace(case, tensors=tensors)
            assert ran.error() <= cases.TOLERANCE["float32"], (shape, setting)
            for name in case.expected:
                if tensors[name].dim() == 4 and tensors[name].shape[-1] == problem.time:
                    tensors[name].fill_(UNTOUCHED)
            assert all(bool((memory == UNTOUCHED).all()) for memory in memories), (shape, setting)


def a_problem(
    direction: str, batch: int, channels: int, time: int = 512, dtype: str = "float32"
) -> LinearScanProblem:
    return posed(f"{batch},{time},{channels}:{dtype}", direction)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("batch", "channels"), [(256, 21), (512, 25), (256, 9)])
def test_many_batches_of_narrow_rows(direction: str, batch: int, channels: int) -> None:
    """They have a CTA each, and no other variant is preferred."""
    kernel, variant = the_kernel(direction)
    problem = a_problem(direction, batch, channels)
    taking = [v for v in kernel.variants if kernel.rules.accepts(v, problem) is None]
    assert min(taking, key=lambda v: kernel.cost(v, problem)) == variant
    assert len(taking) > 1
    assert kernel.launch(variant, problem, 132).grid == (batch, 1, 1)
    assert kernel.tunable.shape is not None
    assert "access=narrow" in kernel.tunable.shape(problem).kind
    assert kernel.tunable.worth(variant, problem)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_has_no_such_kernel(direction: str) -> None:
    """Wide rows, few batches, few scans, rows with gaps, aligned ones, one gate for all steps, packed sequences and other
    dtypes."""
    kernel, variant = the_kernel(direction)
    problem = a_problem(direction, 256, 21)
    assert kernel.rules.accepts(variant, problem) is None
    first, *others = problem.strides
    for other in (
        a_problem(direction, 256, 33),
        a_problem(direction, 63, 21),
        a_problem(direction, 100, 7),
        a_problem(direction, 256, 20),
        replace(problem, sequences=3),
        *(replace(problem, strides=(replace(first, time=step), *others)) for step in (0, 22)),
        *(a_problem(direction, 256, 21, dtype=dtype) for dtype in ITEM_SIZE if dtype != "float32"),
    ):
        assert kernel.rules.accepts(variant, other) is not None, other
    shifted = replace(a_problem(direction, 256, 20), alignment=4)
    assert kernel.rules.accepts(variant, shifted) is None
