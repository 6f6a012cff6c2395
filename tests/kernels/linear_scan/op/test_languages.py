"""Which of CUDA and Triton comes first for packed sequences, with the wheel for a GPU."""

from __future__ import annotations

from functools import cache

import pytest
from explaining import Describe, Make
from selecting import in_memory

from scan_registry.dispatch.select import System, select
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.linear_scan.op.operator import OPERATOR
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant

SM90 = Target.parse("sm90")


@cache
def held() -> tuple[Variant, ...]:
    """What the sm_90 wheel has for scans of 2 and of 4 bytes."""
    return tuple(
        variant
        for kernel in FAMILY.kernels
        for dtype in ("float32", "bfloat16", "float16")
        for variant in kernel.held(dtype, SM90)
    )


@pytest.fixture
def there(a_device: Describe, a_binary: Make) -> System:
    """A GPU with as many SMs as an H200, and the wheel for it; a compiler, so that the spec's own tables count."""
    archive = in_memory("sm90", [a_binary(variant, "sm90")[0] for variant in held()])
    return System(a_device(sm_count=132), (archive,), toolchains={})


@pytest.mark.parametrize(
    ("case", "language"),
    [
        ("channel_last:1,1001,65536:bfloat16:sequences=32", "triton"),
        ("channel_last:1,6,33472:float16:sequences=1009", "triton"),
        ("channel_last:1,2814,10064:float32:sequences=4", "cuda"),
        ("channel_last:1,1024,65536:bfloat16:sequences=32", "cuda"),
        ("channel_last:1,1001,65536:bfloat16", "cuda"),
        ("channel_last:1,81,116556:float16:sequences=18", "cuda"),
        ("time_last:1,32,9710:bfloat16:sequences=401", "cuda"),
        ("time_last:1,32,9710:bfloat16:sequences=401:state=1", "triton"),
        ("time_last:1,473,501:bfloat16:sequences=15", "cuda"),
        ("time_last:1,5394,986:bfloat16:sequences=2", "cuda"),
        ("time_last:1,1144,1562:float32:sequences=10", "cuda"),
        ("time_last:1,2048,4096:bfloat16:sequences=8", "cuda"),
        ("time_last:1,256,1100:float32:sequences=4", "triton"),
        ("time_last:1,90,800:float32:sequences=5", "triton"),
        ("time_last:1,1500,160:float32:sequences=7", "cuda"),
        ("time_last:1,1024,65536:bfloat16:sequences=32", "cuda"),
    ],
)
def test_the_language_that_comes_first(there: System, case: str, language: str) -> None:
    for direction in ("forward", "backward"):
        problem = OPERATOR.posed(Case.parse(case), direction)[-1]
        variant = select(there, FAMILY, problem).taken().variant
        assert variant is not None
        assert variant.language == language
