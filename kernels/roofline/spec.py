"""The roofline family: a streaming kernel that moves as many tensors and bytes as another kernel, and computes nothing.

It is behind no operator: ``scan-registry bench`` takes the time of its fastest variant for the bandwidth roofline.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scan_registry.hardware.target import Target
from scan_registry.kernels import model

FAMILY_NAME = "roofline"
KERNEL_NAME = "stream"
#: Tensors read and written: by a copy, by a forward and by a backward pass.
PATTERNS = ((1, 1), (2, 1), (3, 2))
#: Vectors that a thread has under way, and whether its stores are hinted: of eight ways to stream, those that were
#: the fastest for 95% of the passes in tools/results that were timed with all eight.
_WAYS = ((1, 0), (1, 1), (4, 0))
_VECTOR = 4  # floats in 16 bytes
_INPUTS, _OUTPUTS = ("a", "b", "c"), ("sum", "copy")


@dataclass(frozen=True)
class RooflineProblem:
    """Read ``reads`` tensors and write ``writes``, of ``count`` floats each. All start at multiples of
    16 bytes."""

    kernel = KERNEL_NAME
    #: Of what is counted; the bytes may be anything's.
    dtype = "float32"

    reads: int
    writes: int
    count: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """The kernel's names of what is read."""
        return _INPUTS[: self.reads]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The kernel's names of what is written."""
        return _OUTPUTS[: self.writes]


def _accepts(variant: model.Variant, problem: RooflineProblem) -> str | None:
    moved = variant.number("reads"), variant.number("writes")
    if moved != (problem.reads, problem.writes):
        return f"it reads {moved[0]} tensors and writes {moved[1]}"
    return None


def _launch(variant: model.Variant, problem: RooflineProblem, sm_count: int) -> model.Launch:
    block = 32 * variant.number("warps") * variant.number("unroll") * _VECTOR
    return model.Launch((max(1, -(-problem.count // block)), 1, 1), {"count": problem.count})


def _serves(statics: model.Pins, target: Target) -> bool:
    """GPUs on which nobody has compared the ways have the first alone."""
    pins = dict(statics)
    return target.capability == (9, 0) or (pins.get("unroll", 1), pins.get("hinted", 0)) == _WAYS[0]


_KERNEL = model.Kernel(
    family=FAMILY_NAME,
    name=KERNEL_NAME,
    language="cuda",
    parameters=(
        *(model.Parameter(name, "pointer") for name in (*_INPUTS, *_OUTPUTS)),
        model.Parameter("count", "i64"),
    ),
    defaults=model.Space(
        tuple((("dtype", "float32"), ("reads", r), ("writes", w)) for r, w in PATTERNS),
        lambda kind: tuple(
            (("warps", 8), ("unroll", unroll), ("hinted", hinted)) for unroll, hinted in _WAYS
        ),
    ),
    code=model.Code(
        source="stream.cu",
        entry="stream",
        constants=lambda variant: {
            name.upper(): value for name, value in variant.statics if name != "dtype"
        },
    ),
    rules=model.Rules(_accepts, serves=_serves),
    # Which is the fastest depends on the GPU and the size: whoever wants the roofline tries them all.
    cost=lambda variant, problem: variant.number("unroll"),
    launch=_launch,
)

FAMILY = model.Family(
    name=FAMILY_NAME,
    summary="sum = a + b + c, copy = a: the time that it takes to move the bytes",
    folder=Path(__file__).parent,
    kernels=(_KERNEL,),
)
