"""The total of the sums over time that backward kernels leave of gates' gradient (``gates_sum.cu``): the problem, and the kernel.

A backward kernel that sums the gradient of gates that time steps share leaves several sums for each state. Gates' gradient is
their total over states that share a gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.linear_scan.problem import MOST_ALONG_Y, ceil_div
from scan_registry.kernels.linear_scan.space import FAMILY_NAME
from scan_registry.kernels.model import (
    Code,
    Kernel,
    Launch,
    Parameter,
    Rules,
    Sample,
    Space,
    Variant,
)

NAME = "gates_sum"
POINTERS = ("sums", "gates_grad")
_INTEGERS = (
    *("totals", "kept", "outer", "inner", "part"),
    *("sums_kept_outer", "sums_kept", "sums_outer", "sums_inner", "flags"),
)
PARAMETERS = (
    *(Parameter(name, "pointer") for name in POINTERS),
    *(Parameter(name, "i64") for name in _INTEGERS),
)
#: Of what sums are in, and dtypes of gates beside it, by their flags.
DTYPES = ("float32", "float64", "complex64")
_NARROWED = {"bfloat16": 1, "float16": 2}
#: Sums of a total, from which it has parts, and sums of a part.
_MANY, _OF_PART = 1 << 16, 1 << 13
#: Totals, up to which each has a CTA; sums of a total, up to which totals share one; and sums of a lane, while a total has fewer lanes
#: than a warp.
_FEW_TOTALS, _FEW_SUMS, _OF_LANE = 1 << 10, 1 << 12, 8
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Dimension:
    """How many there are, and the distance from one to the next, in elements."""

    size: int
    stride: int


@dataclass(frozen=True)
class GatesSumProblem:
    """Totals of sums.

    dtype        of the sums
    gates_dtype  of the totals
    kept         two dimensions of what there are totals of, which follow one another
    summed       two dimensions of what a total is of
    parts        of a total
    """

    dtype: str
    gates_dtype: str
    kept: tuple[Dimension, Dimension]
    summed: tuple[Dimension, Dimension]
    parts: int = 1
    direction: str = NAME

    @property
    def kernel(self) -> str:
        return NAME

    @property
    def sums(self) -> bool:
        """Whether the result is several sums, which are still to be added up."""
        return False

    @property
    def totals(self) -> int:
        outer, inner = self.kept
        return outer.size * inner.size

    @property
    def lanes(self) -> int:
        """Those of a warp that add up a total, a power of two; 0 if a whole CTA does."""
        outer, inner = self.summed
        if self.totals <= _FEW_TOTALS or outer.size * inner.size > _FEW_SUMS:
            return 0
        return min(32, 1 << (ceil_div(inner.size, _OF_LANE) - 1).bit_length())

    def scalars(self) -> dict[str, int]:
        """Every integer parameter of the kernel, by name."""
        (kept_outer, kept), (outer, inner) = self.kept, self.summed
        values = self.totals, kept.size, outer.size, inner.size, ceil_div(inner.size, self.parts)
        strides = kept_outer.stride, kept.stride, outer.stride, inner.stride
        flags = _NARROWED.get(self.gates_dtype, 0) | self.lanes << 2
        return dict(zip(_INTEGERS, (*values, *strides, flags), strict=True))

    def cut(self) -> tuple[GatesSumProblem, ...]:
        """Itself, or where a total is of many sums, that of parts, and that of the totals of parts."""
        inner = self.summed[1].size
        if self.summed[0].size * inner <= _MANY:
            return (self,)
        parts = min(ceil_div(self.summed[0].size * inner, _OF_PART), inner, MOST_ALONG_Y)
        totals = Dimension(1, 0), Dimension(self.totals, 1)
        of_total = Dimension(1, 0), Dimension(parts, self.totals)
        first = replace(self, gates_dtype=self.dtype, parts=parts)
        return first, replace(self, kept=totals, summed=of_total)


def _folded(dimensions: Iterable[Dimension]) -> tuple[Dimension, Dimension] | None:
    """Those of several elements as two, of which the second has the smaller stride; None if that takes more."""
    folded: list[Dimension] = []
    for own in dimensions:
        if own.size == 1:
            continue
        outer = folded[-1] if folded else None
        if outer and outer.stride == own.stride * own.size:
            folded[-1] = Dimension(outer.size * own.size, own.stride)
        else:
            folded.append(own)
    one = Dimension(1, 0)
    return None if len(folded) > 2 else ((one, one, *folded)[-2], (one, one, *folded)[-1])


def problem_of(
    shape: Sequence[int],
    strides: Sequence[int],
    gates_shape: Sequence[int],
    dtype: str,
    gates_dtype: str,
) -> GatesSumProblem | None:
    """That of sums of a shape and strides, for gates of a shape that has 1, or lacks a dimension in front, where they are
    broadcast; None if the dimensions do not fold."""
    gates = (*(1,) * (len(shape) - len(gates_shape)), *gates_shape)
    axes = [Dimension(*own) for own in zip(shape, strides, strict=True)]
    kept = _folded(own for own, size in zip(axes, gates, strict=True) if size > 1)
    added = [own for own, size in zip(axes, gates, strict=True) if size == 1]
    summed = _folded(sorted(added, key=lambda own: own.stride, reverse=True))
    if kept is None or summed is None:
        return None
    return GatesSumProblem(dtype, gates_dtype, kept, summed)


#: Sums of 64 pieces of time, for each of 256 channels.
SAMPLE = Sample(
    GatesSumProblem(
        *("float32", "float32"),
        kept=(Dimension(1, 0), Dimension(256, 1)),
        summed=(Dimension(1, 0), Dimension(64, 256)),
    ),
    *("float32", "aligned"),
)


def _rejects(variant: Variant, problem: GatesSumProblem) -> str | None:
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    most = max(problem.totals, *(own.size for own in problem.summed))
    return f"more than {_MOST} totals or sums" if most > _MOST else None


def _launch(variant: Variant, problem: GatesSumProblem, sm_count: int) -> Launch:
    at_once = 32 * variant.number("warps") // problem.lanes if problem.lanes else 1
    return Launch((ceil_div(problem.totals, at_once), problem.parts, 1), problem.scalars())


KERNEL = Kernel(
    family=FAMILY_NAME,
    name=NAME,
    language="cuda",
    parameters=PARAMETERS,
    defaults=Space(
        tuple((("dtype", dtype),) for dtype in DTYPES), lambda kind: ((("warps", 32),),)
    ),
    code=Code(
        source=f"{NAME}.cu",
        entry=f"{FAMILY_NAME}_{NAME}",
        constants=lambda variant: {
            "ELEMENT": variant.text("dtype"),
            "GATE_ELEMENT": variant.text("dtype"),
            "WARPS": variant.number("warps"),
            "MAY_RESET": 0,
        },
    ),
    rules=Rules(_rejects),
    launch=_launch,
    not_on_cpu="on the CPU no kernel of its own adds up sums",
)
