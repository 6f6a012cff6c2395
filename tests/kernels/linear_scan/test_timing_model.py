"""The timing models of linear_scan's kernels."""

from __future__ import annotations

import math

import pytest

from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.linear_scan.timing_model import (
    predicted,
)
from scan_registry.kernels.model import Kernel
from scan_registry.kernels.tuning import Shape

KERNELS = [k for k in FAMILY.kernels if k.language == "cuda" and k.tunable.shape is not None]
KIND = "dtype=float32,gates=float32,access=aligned"
MANY = Shape(KIND, {"lines": 4096.0, "time": 4096.0, "sequences": 1, "broadcast": 1.0})


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_models_are_near_what_was_measured(kernel: Kernel) -> None:
    """Of variants that are within twice the fastest, which selection has to tell apart."""
    errors = []
    for tuning in kernel.tunable.tunings():
        for kind in tuning.kinds:
            for row in tuning.rows(kind):
                for label, ms in row.times.items():
                    text = f"{kernel.head}:{label}"
                    of = Shape(kind, row.sizes)
                    found = predicted(tuning.model, text, of, tuning.sm_count)
                    if found is not None and ms < 2 * min(row.times.values()):
                        errors.append(abs(math.log(found / ms)))
    assert len(errors) > 50
    assert sorted(errors)[len(errors) // 2] < 0.1
    assert sorted(errors)[int(0.95 * len(errors))] < 0.35


def test_what_no_model_is_for_has_no_estimate() -> None:
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    (tuning, *_) = kernel.tunable.tunings()
    ok = f"{kernel.head}:{KIND},warps=4,rows=1,steps=2"
    there = predicted(tuning.model, ok, MANY, 132)
    assert there
    for text in (
        ok.replace("float32", "float64"),
        ok.replace("float32", "bfloat16"),
        ok.replace("aligned", "misaligned"),
        ok.replace("float32", "float3"),
        ok.replace(",steps=2", ""),
        "nonsense",
    ):
        assert predicted(tuning.model, text, MANY, 132) is None
    assert predicted({}, ok, MANY, 132) is None
    for size, value in (("lines", 0), ("sequences", 2)):
        of = Shape(KIND, {**MANY.sizes, size: value})
        assert predicted(tuning.model, ok, of, 132) is None
    wide = Shape(KIND.replace("float32", "float64"), MANY.sizes)
    assert predicted(tuning.model, ok.replace("float32", "float64"), wide, 132) is None
    # Generic access is for all problems of its dtypes.
    generic = predicted(tuning.model, ok.replace("aligned", "generic"), MANY, 132)
    assert generic
    assert generic > there
