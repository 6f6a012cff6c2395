"""The compiled code of ``causal_conv1d`` for the CPU, against the reference in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusing import check_refused
from torch import Tensor
from watched import Memory, levels, using

from scan_registry import causal_conv1d_update
from scan_registry.kernels.causal_conv1d import cases as TRIALS
from scan_registry.kernels.causal_conv1d import reference
from scan_registry.kernels.causal_conv1d.op.operator import OPERATOR
from scan_registry.kernels.causal_conv1d.spec import FAMILY
from scan_registry.ops import _cpu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def error(out: Tensor, expected: Tensor) -> float:
    scale = float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(out.double() - expected)) / (scale or 1.0)


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("width", "length", "time"),
    [(2, 1, 1), (4, 4, 1), (4, 3, 1), (3, 7, 5), (8, 9, 12), (4, 5, 200)],
)
def test_updates(
    width: int, length: int, time: int, step: int, ring: bool, dtype: torch.dtype, instructions: str
) -> None:
    """States in watched memory, each ``step``-th element along time; rows that are there and that are not."""
    torch.manual_seed(time)
    batch, slots, channels = 4, 6, 13
    memory = Memory()
    before = torch.randn(slots, channels, length).to(dtype)
    state = memory.place(before, (0, 1, 2), step)
    x = torch.randn(batch, channels, time).to(dtype)
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    indices = torch.tensor([5, -1, 0, 3], dtype=torch.int32)
    positions = torch.tensor([0, 3, 11, 100], dtype=torch.int32) if ring else None
    expected_state = before.clone()
    given = x, expected_state, weight, bias, positions, indices
    expected = reference.update(*given[:4], reference.UpdateRows(*given[4:]), True)
    with using(instructions):
        y = causal_conv1d_update(x, state, weight, bias, "silu", positions, indices)
    memory.check([state])
    assert torch.equal(state, expected_state)
    assert error(y, expected.double()) <= TOLERANCE[dtype]


FORWARD: list[Any] = ["float32", "float32", (1024,) * 8, (1, 2, 3, 4, 0, 0, *[0] * 6), 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({0: "float64"}, "dtype 'float64'; accepted are float32, bfloat16, float16"),
        ({1: "float16"}, "weight_dtype 'float16' with dtype 'float32'"),
        ({2: (1024,) * 7}, "takes 8 pointers, got 7"),
        ({2: (None,) * 8}, "a pointer of causal_conv1d_forward is null"),
        ({3: (1, 2, 3, 4, 0, 0, *[0] * 5)}, "takes 12 scalars, got 11"),
        ({3: (1, 2, 3, 9, 0, 0, *[0] * 6)}, "width is 9; accepted are 2 to 8"),
        ({3: (1, -2, 3, 4, 0, 0, *[0] * 6)}, "size 1 is -2"),
        ({3: (2, 2, 3, 4, 1, 0, *[0] * 6)}, "batch must be 1 and seq_idx null"),
        ({4: 0}, "threads is 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[int, Any], words: str) -> None:
    check_refused(_cpu.causal_conv1d_forward, FORWARD, changes, words)


def test_offsets_must_rise() -> None:
    x, offsets = torch.zeros(1, 2, 4), torch.tensor([0, 3, 2])
    pointers = (x.data_ptr(),) * 3 + (None,) * 3 + (offsets.data_ptr(), None)
    sizes = (1, 2, 4, 4, 2, 0, *x.stride(), *x.stride())
    with pytest.raises(ValueError, match="offsets do not rise from 0 to time, 4"):
        _cpu.causal_conv1d_forward("float32", "float32", pointers, sizes, 1)


def test_a_state_that_does_not_fit() -> None:
    sizes = (2, 2, 1, 4, 2, 2, 0, *[0] * 9)
    with pytest.raises(
        ValueError, match="a state of 2 slots and 2 inputs, with batch 2 and width 4"
    ):
        _cpu.causal_conv1d_update("float32", "float32", (1024,) * 7, sizes, 1)


@pytest.mark.parametrize("dtype", TRIALS.TOLERANCE)
def test_what_kernels_are_tested_with(dtype: str) -> None:
    """With gaps between rows, in which nothing may be written."""
    for trial in TRIALS.trials(dtype, TRIALS.QUICK[:2], "cpu"):
        for kernel in FAMILY.kernels:
            if kernel.not_on_cpu:
                continue
            case = trial.case(kernel.name, aligned=False)
            gaps = {n: around(t) for n, t in case.tensors.items() if t is not None}
            OPERATOR.run_on_cpu(case.problem, case.tensors)
            assert case.error() <= TRIALS.TOLERANCE[dtype], (kernel.name, trial)
            for name, (before, outside) in gaps.items():
                tensor = case.tensors[name]
                assert tensor is not None
                after, _ = around(tensor)
                assert torch.equal(after[outside], before[outside]), (kernel.name, name)


def around(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of the memory that a tensor lies in, as integers, and which of it is not the tensor's."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    numbers = whole.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    outside = torch.ones(len(whole), dtype=torch.bool)
    outside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return numbers.clone(), outside.repeat_interleave(len(numbers) // max(1, len(whole)))
