"""The CUDA kernels of selective_scan on the CPU, in an emulator of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from emulated_kernels import check

from scan_registry.kernels.model import Variant
from scan_registry.kernels.selective_scan import cases
from scan_registry.kernels.selective_scan.spec import FAMILY

#: One step, tiles that are not full, several tiles, states of several blocks, and groups of odd sizes.
SHAPES = (
    (1, 8, 1, 3),
    (2, 16, 24, 3),
    (2, 40, 72, 16),
    (1, 70, 101, 4),
    (1, 16, 136, 50),
    (1, 16, 40, 33),
)


def chosen() -> Iterator[Variant]:
    """Every tile in bfloat16, and one of each kind in float32."""
    seen = set()
    for variant in FAMILY.variants():
        dtype = variant.text("dtype")
        kind = variant.kernel, dtype, variant.text("layout"), variant.text("access")
        if dtype == "bfloat16" or (dtype == "float32" and kind not in seen):
            seen.add(kind)
            yield variant


@cache
def posed(dtype: str) -> tuple[cases.Trial, ...]:
    """Every shape with every setting, solved once."""
    torch.manual_seed(0)
    return tuple(cases.draw(*each, dtype, "cpu") for each in product(SHAPES, cases.SETTINGS))


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "variant"), enumerate(chosen()), ids=str)
def test_matches_the_reference(turn: int, variant: Variant, emulated: Callable[..., Any]) -> None:
    """With every option, in whatever order the CTAs and their threads run."""
    library = emulated(FAMILY, variant)
    dtype = variant.text("dtype")
    check(library, posed(dtype), cases.TOLERANCE[dtype], turn)
