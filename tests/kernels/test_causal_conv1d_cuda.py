"""The CUDA kernels of causal_conv1d on the CPU, in an emulator of the GPU, against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scan_registry.kernels.causal_conv1d import cases, problem
from scan_registry.kernels.causal_conv1d.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.runtime import jit

#: (batch, channels, time): one step, less than a filter, whole chunks, rows cut into pieces, and primes.
SHAPES = ((1, 8, 1), (2, 16, 8), (3, 5, 3), (1, 264, 96), (2, 7, 613), (1, 8, 1040))
NEEDS_NVRTC = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)


def chosen() -> Iterator[Variant]:
    """All but those of float16, of which two."""
    for variant in FAMILY.variants():
        wide = variant.text("dtype") != "float16"
        if wide or "access=generic" in str(variant) or variant.kernel == "update":
            yield variant


@pytest.mark.parametrize("variant", [*chosen()], ids=str)
def test_matches_the_reference(
    variant: Variant, cuda_emulator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every option, in whatever order the CTAs run, for launches of one chunk a thread and of more."""
    kernel, dtype = FAMILY.kernel(variant.kernel, "cuda"), variant.text("dtype")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    torch.manual_seed(0)
    tried = 0
    for number, shape in enumerate(SHAPES):
        monkeypatch.setattr(problem, "_ENOUGH", (160_000, 40)[number % 2])
        for setting in cases.SETTINGS:
            trial = cases.draw(shape, setting, dtype, "cpu")
            for case in trial.launches(kernel.name):
                if kernel.rules.accepts(variant, case.problem):
                    continue
                library.run(case.problem, case.tensors, number)
                assert case.error() <= cases.TOLERANCE[dtype], f"{trial} {case.problem}"
                tried += 1
    assert tried >= 10
