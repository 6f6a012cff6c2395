"""For how many CTAs on an SM the kernel of a backward pass is: three, or two that have more registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from posing import taken

from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Variant
from scan_registry.kernels.selective_scan.op.bench import Case
from scan_registry.kernels.selective_scan.op.operator import OPERATOR
from scan_registry.kernels.selective_scan.spec import FAMILY

KERNEL = FAMILY.kernel("backward", "cuda")
H100 = Target.parse("sm_90")
SMS = 132


def chosen(text: str, target: Target) -> Variant:
    problem: Any = OPERATOR.posed(Case.parse(text), "backward")[0]
    problem = replace(problem, parts=problem.parts_for(SMS))
    served = [v for v in taken(KERNEL, problem) if KERNEL.rules.serves(v.statics, target)]
    return min(served, key=lambda variant: KERNEL.cost(variant, problem))


@pytest.mark.parametrize(
    ("text", "ctas"),
    [
        ("time_last:8,2048,2048,16:bfloat16", 2),
        ("time_last:1,2048,4096,16:bfloat16", 2),
        ("time_last:32,1536,512,16:bfloat16", 3),
        ("time_last:1,8192,16384,16:bfloat16", 3),
        ("time_last:8,2048,2048,16:float16", 3),
        ("time_last:8,2048,4096,16:float32", 3),
        ("channel_last:8,2048,2048,16:bfloat16", 3),
    ],
)
def test_ctas_have_more_registers_where_no_sm_gets_three(text: str, ctas: int) -> None:
    assert chosen(text, H100).number("ctas") == ctas


@pytest.mark.parametrize("arch", ["sm_80", "compute_80", "sm_100"])
def test_other_architectures_have_kernels_with_many_registers_alone(arch: str) -> None:
    for text in ("time_last:8,2048,2048,16:bfloat16", "time_last:32,1536,512,16:bfloat16"):
        assert chosen(text, Target.parse(arch)).number("ctas") == 2


def test_warps_share_the_channels_of_many_aligned_rows() -> None:
    """On sm_90, whose archive has no room for the kernel that is faster by 1%; not the one of generic access."""
    kernel = FAMILY.kernel("forward", "cuda")
    problem: Any = OPERATOR.posed(Case.parse("time_last:32,1536,512,16:bfloat16"), "forward")[0]
    served = [v for v in taken(kernel, problem) if kernel.rules.serves(v.statics, H100)]
    variant = min(served, key=lambda variant: kernel.cost(variant, problem))
    assert (variant.text("access"), variant.number("split")) == ("aligned", 2)
