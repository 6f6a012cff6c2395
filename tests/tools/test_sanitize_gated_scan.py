"""``tools/sanitize_gated_scan.py``: that its few problems reach every kernel of a wheel."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from scan_registry.hardware.target import Target
from scan_registry.kernels.gated_scan.cases import draw
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.spec import FAMILY

SM_COUNT = 132


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_variant_of_a_wheel_runs(load_tool: Callable[[str], ModuleType], dtype: str) -> None:
    tool, takes = load_tool("sanitize_gated_scan"), load_tool("sanitize").takes
    posed = [
        draw(shape, kind, setting, dtype, "cpu") for kind in KINDS for shape, setting in tool.POSED
    ]
    for kernel in FAMILY.kernels:
        ships = [
            variant
            for variant in kernel.by_text.values()
            if variant.text("dtype") == dtype
            and kernel.rules.ships(variant.statics, Target.parse("sm_90"))
        ]
        for variant in ships:
            cases = [case for trial in posed for case in tool.launches(trial, variant)]
            taken = [case for case in cases if takes(kernel, variant, case.problem, SM_COUNT)]
            assert taken, variant
            if variant.text("access") == "generic":
                assert any(case.problem.sequences for case in taken)
            assert {case.problem.resets for case in taken} == {False, True}
