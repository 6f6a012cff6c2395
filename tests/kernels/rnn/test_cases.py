"""The problems that ``selftest`` and attestations draw: they are what the kernels take, and tell right
results from wrong ones."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from scan_registry.kernels.rnn import cases
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.kernels.rnn.spec import FAMILY

SHAPE = (3, 4, 2, 16)
CUDA = [kernel for kernel in FAMILY.kernels if kernel.language == "cuda"]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", CUDA, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", cases.TOLERANCE)
def test_a_kernel_passes_its_cases(
    kernel: object, dtype: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Each setting, with gaps and without; a function for each dtype."""
    assert isinstance(kernel, type(CUDA[0]))
    function = {"float32": "slstm", "bfloat16": "lstm", "float16": "gru"}[dtype]
    library = None
    for number, setting in enumerate(cases.SETTINGS):
        torch.manual_seed(number)
        trial = cases.draw(function, SHAPE, setting, dtype, "cpu")  # type: ignore[arg-type]
        case = trial.case(kernel.name, aligned=bool(number % 2))
        assert case.error() == float("inf")  # nothing has been written
        if library is None:
            variant = next(
                v for v in kernel.variants if kernel.rules.accepts(v, case.problem) is None
            )
            library = cuda_emulator.emulated(kernel, variant, tmp_path)
        library.run(case.problem, case.tensors, number)
        assert case.error() <= cases.TOLERANCE[dtype], trial
        name = next(iter(case.expected))
        out = case.tensors[name]
        assert out is not None
        out[(-1,) * out.dim()] += 1000
        assert case.error() > cases.TOLERANCE[dtype]


def test_every_function_and_setting_is_drawn() -> None:
    for dtype in cases.TOLERANCE:
        drawn = [*cases.trials(dtype, (SHAPE, (1, 1, 1, 16), (2, 3, 1, 32)), "cpu")]
        assert {trial.function for trial in drawn} == set(SIZES)
        assert {trial.setting for trial in drawn} == set(cases.SETTINGS)
        for trial in drawn:
            for kernel in CUDA:
                for aligned in (True, False):
                    case = trial.case(kernel.name, aligned=aligned)
                    assert any(
                        kernel.rules.accepts(v, case.problem) is None for v in kernel.variants
                    )
                    assert set(case.tensors) <= set(kernel.pointers)
