"""Which language comes first for packed sequences: as timed on an H200 and an H100, where the times are far apart."""

from __future__ import annotations

import pytest

from scan_registry.kernels.linear_scan import packed
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY

#: Rows, time, sequences, dtype, and how many times as fast Triton was as CUDA, forward.
TIMED = (
    (6, 41508, 61, "float16", 43.3),
    (16, 495527, 40, "float32", 6.23),
    (1, 733616, 159, "float16", 31.8),
    (3080, 71297, 36, "bfloat16", 2.10),
    (2, 205774, 15, "bfloat16", 3.29),
    (7442, 1349, 64, "bfloat16", 0.13),
    (7, 69_610, 5, "bfloat16", 2.7),
    (8, 723_218, 27, "float16", 7.6),
)


def a_problem(
    rows: int, time: int, sequences: int, dtype: str = "bfloat16", layout: str = "time_last"
) -> LinearScanProblem:
    strides = Strides(0, rows * time, time, 1)
    if layout == "channel_last":
        strides = Strides(0, rows * time, 1, rows)
    every = (strides,) * 3, (Strides(0, rows * sequences, 1, rows),)
    sizes = 1, 1, rows, time
    return LinearScanProblem("forward", layout, dtype, dtype, *sizes, sum(every, ()), 16, sequences)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "time", "sequences", "dtype", "times_as_fast"), TIMED)
def test_the_faster_language_comes_first(
    rows: int, time: int, sequences: int, dtype: str, times_as_fast: float
) -> None:
    problem = a_problem(rows, time, sequences, dtype)
    first = "triton" if times_as_fast > 1 else "cuda"
    assert FAMILY.languages(problem)[0] == first
    ratio = packed.cuda_rows_ms(problem) / packed.triton_rows_ms(problem)
    assert (ratio > 1) == (times_as_fast > 1)


def test_cuda_comes_first_for_all_else() -> None:
    few = a_problem(1, 100_000, 100)
    assert FAMILY.languages(few) == ("triton", "cuda")
    for other in (
        a_problem(1, 100_000, 0),
        a_problem(1, 100_000, 1),
        a_problem(1, 100_000, 2, "float32"),  # the longer one is most of the row
        a_problem(1, 100_000, 100, "float64"),
        a_problem(1, 100_000, 100, layout="channel_last"),
    ):
        assert FAMILY.languages(other) == ("cuda", "triton")


def test_longest_is_between_the_mean_and_all() -> None:
    assert packed.longest(a_problem(1, 1000, 1)) == 1000
    assert 100 < packed.longest(a_problem(1, 1000, 10)) < 1000
    assert packed.longest(a_problem(1, 3, 3)) <= 3
