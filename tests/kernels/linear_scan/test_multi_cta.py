"""CUDA kernels of linear_scan over misaligned rows in columns that several CTAs share, in an emulator of the GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from contiguous_channels import (
    DIRECTIONS,
    keeps_to_its_memory,
    only_kernel,
    posed,
    with_and_without_states,
)

from scan_registry.kernels.linear_scan import cases
from scan_registry.kernels.linear_scan.space import MULTI_CTA, SCALAR

#: (batch, channels, time): a column that is not full, one of a single channel more than a column has, and time steps that end within a
#: tile; as many CTAs for each column as the tile is for, and fewer.
SHAPES = ((1, 61, 1100), (1, 65, 700), (2, 37, 900), (1, 64, 517))


#: The most CTAs of a column, and the channels of a thread.
TILES = ((4, 2), (8, 2), (8, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turn", "dtype", "most", "vector", "direction"),
    [
        (turn, dtype, *tile, direction)
        for turn, (dtype, tile, direction) in enumerate(
            product(["bfloat16", "float16"], TILES, DIRECTIONS)
        )
    ],
)
def test_ctas_that_share_misaligned_columns(
    turn: int,
    direction: str,
    dtype: str,
    most: int,
    vector: int,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    thorough: bool,
) -> None:
    """The results are right, and nothing beside them changes, wherever rows start in their 16 bytes."""
    kernel, variant = only_kernel(direction, MULTI_CTA, dtype, ctas_per_column=most, vector=vector)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    problems = with_and_without_states(SHAPES, turn + turn // 6, thorough)
    keeps_to_its_memory(kernel, variant, library, problems, cases.TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("case", "access", "ctas", "channels"),
    [
        ("8,4099,301:bfloat16", MULTI_CTA, 3, 64),
        ("4,8192,999:float16", MULTI_CTA, 4, 128),
        ("8,4099,601:bfloat16", MULTI_CTA, 3, 128),
        ("1,1716,1193:bfloat16", MULTI_CTA, 6, 64),
        ("2,35918,375:float16", MULTI_CTA, 8, 64),
        ("8,4099,1001:bfloat16", "misaligned", None, None),
        ("6,10000,130:bfloat16", MULTI_CTA, 7, 64),
        ("8,63747,49:bfloat16", SCALAR, None, None),
        ("3,1900,45:bfloat16", SCALAR, None, None),
        ("4,1664,87:bfloat16", MULTI_CTA, 8, 64),
        ("20,384,33:float16", MULTI_CTA, 6, 64),
        ("4,8192,1000:float16", "aligned", None, None),
        ("4,400,999:float16", "misaligned", None, None),
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_takes_few_columns_of_many_channels(
    case: str, access: str, ctas: int | None, channels: int | None, direction: str
) -> None:
    """On a GPU of 132 SMs. Fewer SMs leave a column fewer CTAs, or have no room for two of each."""
    problem = posed(case, direction)
    variants = [
        only_kernel(direction, MULTI_CTA, problem.dtype, ctas_per_column=most, vector=vector)
        for most, vector in TILES
    ]
    kernel = variants[0][0]
    assert kernel.tunable.shape is not None
    assert f"access={access}" in kernel.tunable.shape(problem).kind
    takes = [v for _, v in variants if kernel.rules.accepts(v, problem) is None]
    if ctas is None or channels is None:
        assert not takes
        return
    columns = problem.batch * -(-problem.channels // channels)
    variant = min(takes, key=lambda v: kernel.cost(v, problem))
    assert 32 * variant.number("vector") == channels
    assert (variant.number("ctas_per_column") == 4) == (ctas <= 4 and channels == 64)
    assert kernel.launch(variant, problem, 132).grid == (columns * ctas, 1, 1)
    assert kernel.rules.exceeds_residency(variant, problem, 132) is None
    assert kernel.rules.exceeds_residency(variant, problem, 2 * columns - 1) is not None
