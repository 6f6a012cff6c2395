"""The scale family: y = factor · x."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scan_registry.kernels.model import (
    Code,
    Family,
    Kernel,
    Launch,
    Parameter,
    Rules,
    Sample,
    Space,
    Variant,
)


@dataclass(frozen=True)
class ScaleProblem:
    """``size`` numbers, and what they are multiplied by."""

    dtype: str
    size: int
    factor: int

    @property
    def kernel(self) -> str:
        return "scale"


def _accepts(variant: Variant, problem: ScaleProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    return None


def _launch(variant: Variant, problem: ScaleProblem, sm_count: int) -> Launch:
    blocks = -(-problem.size // variant.number("threads"))
    return Launch((blocks, 1, 1), {"size": problem.size, "factor": problem.factor})


SCALE = Kernel(
    family="scale",
    name="scale",
    language="cuda",
    parameters=(
        Parameter("x", "pointer"),
        Parameter("y", "pointer"),
        Parameter("size", "i64"),
        Parameter("factor", "i64"),
    ),
    # Of each kind, here one dtype, the static parameters that are built.
    defaults=Space(((("dtype", "float32"),),), lambda kind: ((("threads", 256),),)),
    code=Code(
        source="scale.cu",
        entry="scale",
        constants=lambda variant: {"THREADS": variant.number("threads")},
        warps=lambda variant: variant.number("threads") // 32,
    ),
    rules=Rules(_accepts),
    launch=_launch,
)

FAMILY = Family(
    name="scale",
    summary="y = factor · x",
    folder=Path(__file__).parent,
    kernels=(SCALE,),
    samples=(Sample(ScaleProblem("float32", 1000, 3), "float32", "aligned"),),
)
