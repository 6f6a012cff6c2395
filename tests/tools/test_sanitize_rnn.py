"""``tools/sanitize_rnn.py``: that its few problems reach every kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from scan_registry.catalog.inventory import catalogue
from scan_registry.kernels.rnn import tilings
from scan_registry.kernels.rnn.cases import TOLERANCE, draw
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.kernels.rnn.spec import FAMILY

SM_COUNT = 132


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> Any:
    return load_tool("sanitize_rnn")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("function", SIZES)
def test_every_binary_runs(tool: Any, function: Any, dtype: str) -> None:
    trials = [(p, draw(function, p.shape, p.setting, dtype, "cpu")) for p in tool.POSED]
    posed = {
        name: [(p.shape, trial.case(name, aligned=p.aligned).problem) for p, trial in trials]
        for name in dict.fromkeys(kernel.name for kernel in FAMILY.kernels)
    }
    found = {
        binary.variant
        for _, binary in catalogue()
        if binary.variant.family == "rnn"
        and (binary.variant.text("function"), binary.variant.text("dtype")) == (function, dtype)
    }
    for variant in found or FAMILY.variants():
        if (variant.text("function"), variant.text("dtype")) != (function, dtype):
            continue
        kernel = FAMILY.kernel(variant.kernel, variant.language)
        taken = [
            shape
            for shape, problem in posed[variant.kernel]
            if tool.takes(kernel, variant, problem, SM_COUNT)
        ]
        assert taken
        values = dict(variant.statics)
        if variant.language == "cuda" and "cluster" in values:
            # Several blocks of a head wait for each other, for longer than a ring.
            wide = not values["batches"] and values["rows"] == 8  # one block, which has room for it
            assert (tool.TOGETHER in taken) == (wide or values["cluster"] != 1)
            assert tool.TOGETHER[1] > 2 * tilings.RING
        if (
            values.get("rows") == 1
            and variant.kernel == "sequence_backward"
            and function != "elman"
        ):
            gates, item = SIZES[function].recurrent, 4 if dtype == "float32" else 2
            given = {**values, "gates": gates, "item": item, "backward": 1}
            assert max(tilings.windows({**given, "dim": shape[3]}) for shape in taken) > 1


def test_kernels_are_told_by_their_names() -> None:
    assert all("ward" in kernel.code.entry for kernel in FAMILY.kernels)
