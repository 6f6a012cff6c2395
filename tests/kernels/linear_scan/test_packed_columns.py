"""Packed sequences in columns of contiguous channels, of which each sequence has a CTA, in an emulator of the GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from selecting import like

from scan_registry.kernels.linear_scan import cases
from scan_registry.kernels.linear_scan.spec import FAMILY

TIME = 384
#: Of sequences of one length and empty ones, of several lengths, and of more than a CTA has threads to order.
BOUNDS = (
    torch.arange(0, TIME + 1, 32).repeat_interleave(2),
    torch.tensor([0, 7, 7, 30, 130, 131, 200, TIME]),
    torch.cat([torch.arange(300), torch.tensor([TIME])]),
)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("lanes_across", [8, 16])
def test_columns_of_any_lengths_match_the_reference(
    direction: str,
    lanes_across: int,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = FAMILY.kernel(f"channel_last_{direction}", "cuda")
    pins = {"dtype": "bfloat16", "access": "varlen", "lanes_across": lanes_across, "vector": 2}
    library = cuda_emulator.emulated(kernel, like(kernel, pins), tmp_path)
    for number, bounds in enumerate(BOUNDS):
        monkeypatch.setattr(cases, "random_cu_seqlens", lambda time, bounds=bounds: bounds)
        setting = cases.Setting(states=True, reverse=number == 1, packed=True)
        trial = cases.draw((1, 24, TIME), setting, "bfloat16", "cpu")
        case = trial.case(kernel.name, aligned=True)
        assert kernel.rules.accepts(library.variant, case.problem) is None
        library.run(case.problem, case.tensors, seed=number)
        assert case.error() <= cases.TOLERANCE["bfloat16"], str(trial)
