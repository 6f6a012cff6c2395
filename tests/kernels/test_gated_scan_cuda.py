"""The CUDA kernels of gated_scan on the CPU, against the kinds' lines in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scan_registry.kernels.gated_scan import cases
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel, Variant

#: (batch, channels, time): columns that are not full, rows of whole pieces and not, one step, and several tiles.
SHAPES: tuple[cases.Shape, ...] = ((2, 72, 70), (1, 24, 150), (2, 5, 65), (3, 33, 37), (2, 8, 1))
#: For variants whose tiles depend on others that run at the same time.
LONG: cases.Shape = (1, 72, 1400)


def _variants() -> Iterator[Variant]:
    """Of every kind in float32 and bfloat16, and one in float16: every tile."""
    for kernel in FAMILY.kernels:
        if kernel.language == "cuda":
            for variant in kernel.variants:
                if variant.text("dtype") != "float16" or variant.text("kind") == "rg_lru":
                    yield variant


@cache
def trials(source: str, dtype: str) -> tuple[cases.Trial, ...]:
    """Every kind of a header with every setting; shapes take turns."""
    torch.manual_seed(0)
    names = [name for name, kind in KINDS.items() if kind.source == source]
    count = len(SHAPES)
    return tuple(
        cases.draw(SHAPES[(number + turn) % count], name, setting, dtype, "cpu")
        for name in names
        for number, setting in enumerate(cases.SETTINGS)
        for turn in (0, 2)
    )


@cache
def long(source: str, dtype: str) -> tuple[cases.Trial, ...]:
    torch.manual_seed(1)
    settings = (cases.Setting(states=True), cases.Setting(True, reverse=True, resets=True))
    return tuple(cases.draw(LONG, source, setting, dtype, "cpu") for setting in settings)


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(_variants()), ids=str)
def test_matches_the_reference(variant: Variant, cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """With every option, in whatever order the CTAs and their threads run."""
    kernel = FAMILY.kernel(variant.kernel, "cuda")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    source, dtype = variant.text("kind"), variant.text("dtype")
    cut = {"ctas_per_column", "prefix_lead"} & {*dict(variant.statics)}
    checked = 0
    for trial in (*trials(source, dtype), *(long(source, dtype) if cut else ())):
        for case in trial.launches(kernel.name):
            if kernel.rules.accepts(variant, case.problem) is None:
                library.run(case.problem, case.tensors, seed=checked)
                errors = case.errors()
                assert max(errors.values()) <= cases.TOLERANCE[dtype], (str(trial), errors)
                checked += 1
    assert checked


def like(kernel: Kernel, **pins: str) -> Variant:
    """The first of the kernel's variants that has these static parameters."""
    return next(v for v in kernel.variants if pins.items() <= dict(v.statics).items())
