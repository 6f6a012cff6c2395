"""The CUDA kernel of linear_scan that totals the sums of gates' gradient, in an emulator of the GPU."""

from __future__ import annotations

from dataclasses import replace
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
    ("dtype", "gates_dtype", "warps"),
    [
        *((torch.float32, torch.float32, 4), (torch.float32, torch.bfloat16, 4)),
        *((torch.float32, torch.float16, 32), (torch.float64, torch.float64, 4)),
        (torch.complex64, torch.complex64, 4),
    ],
)
def test_totals_are_those_of_torch(
    dtype: torch.dtype,
    gates_dtype: torch.dtype,
    warps: int,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one launch, or in two, with a CTA or some lanes for each; once with the threads that are built, of which an emulator takes long to start so many."""
    torch.manual_seed(0)
    kernel = gates_sum.KERNEL
    of_dtype = str(dtype).removeprefix("torch.")
    (built,) = (v for v in kernel.variants if v.text("dtype") == of_dtype)
    variant = replace(built, statics=tuple((dict(built.statics) | {"warps": warps}).items()))
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    launches: list[GatesSumProblem] = []

    def runner(problem: GatesSumProblem) -> Any:
        assert kernel.rules.accepts(variant, problem) is None

        def run(tensors: dict[str, Tensor]) -> None:
            launches.append(problem)
            library.run(problem, tensors, 0)

        return run

    for many, few_totals in ((1 << 15, 1 << 10), (1 << 15, 1), (100, 1 << 10)):
        monkeypatch.setattr(gates_sum, "_FEW_TOTALS", few_totals)
        monkeypatch.setattr(gates_sum, "_MANY", many)
        monkeypatch.setattr(gates_sum, "_OF_PART", many // 3)
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
    assert {problem.parts > 1 for problem in launches} == {False, True}


def test_totals_of_few_sums_share_a_cta() -> None:
    """Where there are thousands: most threads of a CTA for each would have nothing to add."""
    (variant, *_) = gates_sum.KERNEL.variants
    one = gates_sum.Dimension(1, 0)

    def ctas(totals: int, sums: int) -> tuple[int, int]:
        kept, summed = gates_sum.Dimension(totals, 1), gates_sum.Dimension(sums, totals)
        problem = GatesSumProblem("float32", "float32", (one, kept), (one, summed))
        return problem.lanes, gates_sum.KERNEL.launch(variant, problem, 132).grid[0]

    assert ctas(1024, 4) == (0, 1024)
    assert ctas(40544, 4) == (1, 40)
    assert ctas(13184, 9) == (2, 26)
    assert ctas(2000, 300) == (32, 63)
    assert ctas(2000, 5000) == (0, 2000)


def test_what_does_not_fold_is_left_to_torch() -> None:
    shape, strides = (5, 2, 3, 4, 6, 2), (288, 144, 48, 12, 2, 1)
    assert gates_sum.problem_of(shape, strides, (2, 1, 4, 1, 2), "float32", "float32") is None
