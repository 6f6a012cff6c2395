"""``tools/sanitize_selective_scan.py``: that its few problems reach every kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from scan_registry.kernels.selective_scan.cases import TOLERANCE, draw
from scan_registry.kernels.selective_scan.spec import FAMILY


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_variant_runs(load_tool: Callable[[str], ModuleType], dtype: str) -> None:
    tool = load_tool("sanitize_selective_scan")
    trials = [draw(shape, setting, dtype, "cpu") for shape, setting in tool.POSED]
    idle = {variant for variant in FAMILY.variants() if variant.text("dtype") == dtype}
    for kernel in FAMILY.kernels:
        problems = [case.problem for trial in trials for case in trial.launches(kernel.name)]
        for variant in [each for each in idle if each.kernel == kernel.name]:
            if any(kernel.rules.accepts(variant, problem) is None for problem in problems):
                idle.remove(variant)
    assert not idle
