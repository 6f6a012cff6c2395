"""The CUDA kernel of linear_scan that totals the sums of gates' gradient, in an emulator of the GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan import gates_sum
from scan_registry.kernels.linear_scan.cases import TOLERANCE, wide
from scan_registry.kernels.linear_scan.gates_sum import GatesSumProblem
from scan_registry.kernels.linear_scan.op import totals
from scan_registry.kernels.linear_scan.op.problems import StateLayout
from scan_registry.kernels.model import Launch

#: Shapes of states, the time dimension, shapes of gates, and sums for each state.
CASES = (
    *(((3, 9, 8), 1, (8,), 7), ((3, 9, 8), -2, (3, 1, 8), 5), ((2, 3, 9, 4), 2, (3, 1, 4), 3)),
    *(
        ((2, 3, 9, 4), -2, (2, 1, 1, 4), 300),
        ((9, 3, 4), 0, (1, 1, 4), 1),
        ((4, 3, 9), -1, (3, 1), 40),
    ),
    *(((4, 3, 9), -1, (1,), 700), ((9, 5), 0, (1, 1), 2000), ((9,), 0, (1,), 3)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "gates_dtype"),
    [
        *((torch.float32, torch.float32), (torch.float32, torch.bfloat16)),
        *((torch.float32, torch.float16), (torch.float64, torch.float64)),
        (torch.complex64, torch.complex64),
    ],
)
def test_totals_are_those_of_torch(
    dtype: torch.dtype,
    gates_dtype: torch.dtype,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one CTA or several, each with one total or many."""
    torch.manual_seed(0)
    kernel = gates_sum.KERNEL
    of_dtype = str(dtype).removeprefix("torch.")
    (variant,) = (v for v in kernel.variants if v.text("dtype") == of_dtype)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    launches: list[Launch] = []

    def runner(problem: GatesSumProblem) -> Any:
        assert kernel.rules.accepts(variant, problem) is None

        def run(tensors: dict[str, Tensor]) -> None:
            launches.append(kernel.launch(variant, problem, sm_count))
            library.run(problem, tensors, 0, sm_count)

        return run

    for gpu in ((1 << 15, 6), (1 << 15, 1), (1, 24)):
        at_once, sm_count = gpu
        monkeypatch.setattr(gates_sum, "_AT_ONCE", at_once)
        for packed in (False, True):
            for shape, dim, gates_shape, pieces in (
                CASES if gates_dtype == torch.float32 else CASES[4:7]
            ):
                model = torch.empty(shape, dtype=dtype)
                bounds = torch.tensor([0, 4, 4, 9]) if packed else None
                layout = StateLayout.of(model, dim, bounds)
                gates = torch.empty(gates_shape, dtype=gates_dtype)
                # All positive, so that nothing cancels.
                sums = layout.sums(pieces)
                sums.copy_(torch.rand(sums.shape, dtype=dtype))
                actual = totals.plan_total(gates, layout, pieces, dim, runner)(sums)
                by_torch = totals.plan_total(gates, layout, pieces, dim, None)(wide(sums))
                assert actual.shape == gates.shape
                assert actual.dtype == by_torch.dtype == gates_dtype
                expected = totals._sum_to(
                    gates_shape, layout.each_sum(wide(sums)), dim, layout.packed
                )
                tolerance = TOLERANCE[str(gates_dtype).removeprefix("torch.")]
                for total in (actual, by_torch):
                    assert relative_error(total, expected) <= tolerance
    assert {launch.grid[1] > 1 for launch in launches} == {False, True}


def test_ctas_are_as_many_as_keep_a_gpu_busy() -> None:
    """A CTA has more totals where there are thousands, and several share one of many sums."""
    (variant, *_) = gates_sum.KERNEL.variants
    one = gates_sum.Dimension(1, 0)

    def grid(totals: int, sums: int, apart: int) -> tuple[int, int]:
        kept = gates_sum.Dimension(totals, sums if apart == 1 else 1)
        summed = gates_sum.Dimension(sums, apart)
        problem = GatesSumProblem("float32", "float32", (one, kept), (one, summed))
        return gates_sum.KERNEL.launch(variant, problem, 132).grid[:2]

    assert grid(1, 300, 1) == (1, 1)
    assert grid(1, 32780, 1) == (1, 9)
    assert grid(1, 1 << 24, 1) == (1, 132)
    assert grid(1024, 14, 1024) == (128, 1)
    assert grid(256, 520, 256) == (32, 1)
    assert grid(40544, 4, 40544) == (159, 1)
    assert grid(1 << 20, 4, 1 << 20) == (4096, 1)
    assert grid(2000, 300, 1) == (125, 1)
    assert grid(200, 30000, 1) == (100, 1)


def test_what_does_not_fold_is_left_to_torch() -> None:
    shape, strides = (5, 2, 3, 4, 6, 2), (288, 144, 48, 12, 2, 1)
    assert gates_sum.problem_of(shape, strides, (2, 1, 4, 1, 2), "float32", "float32") is None
