"""``selective_scan`` on its own CUDA kernels, emulated on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from planning import forget_plans
from posing import best
from torch import Tensor

from scan_registry.kernels.selective_scan.op import plans
from scan_registry.kernels.selective_scan.spec import FAMILY
from scan_registry.ops.launching import PlanCache, Run

Play = Callable[..., list[str]]


def player(monkeypatch: pytest.MonkeyPatch, cuda_emulator: ModuleType, folder: Path) -> Play:
    """Has CPU tensors taken for a GPU's, and problems given to the emulator; lists the kernels that ran."""

    def start(parts: int = 1, quickly: bool = True) -> list[str]:
        used: list[str] = []

        def prepared(problem: Any, device: torch.device, backend: Any) -> Run:
            kernel = FAMILY.kernel(problem.kernel, "cuda")
            variant = best(kernel, problem)
            library = cuda_emulator.emulated(kernel, variant, folder)

            def run(tensors: Mapping[str, Tensor | None]) -> None:
                used.append(problem.kernel)
                library.run(problem, {n: tensors.get(n) for n in kernel.pointers}, 0)

            return run

        monkeypatch.setattr(plans, "on_gpu", lambda tensor: True)
        monkeypatch.setattr(plans, "_prepared", prepared)
        monkeypatch.setattr(plans, "parts_of", lambda *_: parts)
        monkeypatch.setattr(plans, "plan_cache", PlanCache())
        forget_plans(monkeypatch, "selective_scan", quickly)
        return used

    return start
