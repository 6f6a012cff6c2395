"""The total of the sums over time that backward kernels leave of gates' gradient (``gates_sum.cu``): the problem, and the kernel.

A backward kernel that sums the gradient of gates that time steps share leaves several sums for each state. Gates' gradient is
their total over states that share a gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.linear_scan.problem import ceil_div
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
_INTEGERS = (
    *("totals", "kept", "rows", "columns"),
    *("kept_outer_stride", "kept_stride", "row_stride", "column_stride", "flags"),
)
PARAMETERS = (
    *(Parameter(name, "pointer") for name in ("sums", "gates_grad", "workspace")),
    *(Parameter(name, "i64") for name in _INTEGERS),
)
#: Of what sums are in, and dtypes of gates beside it, by their flags.
DTYPES = ("float32", "float64", "complex64")
_NARROWED = {"bfloat16": 1, "float16": 2}
#: Sums that a thread loads at once. Where it has more than two times as many, totals have parts.
_AT_ONCE = 16
#: Bytes that a part leaves of a total.
_OF_PART = 16
#: Totals of a CTA that lie side by side, if there are few: a GPU reads 32 bytes at once.
_SIDE_BY_SIDE = 8
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
    """

    dtype: str
    gates_dtype: str
    kept: tuple[Dimension, Dimension]
    summed: tuple[Dimension, Dimension]
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
    def of_total(self) -> int:
        """Sums of a total."""
        outer, inner = self.summed
        return outer.size * inner.size

    def across(self, threads: int, most: int) -> int:
        """Totals of a CTA, a power of two: few, but that there are not more than so many CTAs. Lanes side by side read what
        lies side by side: sums of one total, or of several."""
        (_, kept), (_, inner) = self.kept, self.summed
        several = inner.size == 1 or inner.stride > kept.stride
        across = _SIDE_BY_SIDE if several else 1
        while across < threads and ceil_div(self.totals, across) > most:
            across *= 2
        return min(across, 1 << (self.totals - 1).bit_length())

    def scalars(self, across: int, threads: int) -> dict[str, int]:
        """Every integer parameter of the kernel, by name."""
        (kept_outer, kept), (rows, columns) = self.kept, self.summed
        along, wide = threads // across, 1
        # Threads take turns along the dimension of rows. Each has all columns, or those in one of `wide` places.
        if rows.size == 1 or columns.size >= 2 * _AT_ONCE * along:
            rows, columns = columns, rows
        else:
            wide = min(along, 1 << columns.size.bit_length() - 1)
        values = self.totals, kept.size, rows.size, columns.size
        strides = kept_outer.stride, kept.stride, rows.stride, columns.stride
        flags = _NARROWED.get(self.gates_dtype, 0) | _log2(across) << 2 | _log2(wide) << 8
        return dict(zip(_INTEGERS, (*values, *strides, flags), strict=True))


def _log2(number: int) -> int:
    return number.bit_length() - 1


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
    return f"more than {_MOST} sums" if problem.totals * problem.of_total > _MOST else None


def _launch(variant: Variant, problem: GatesSumProblem, sm_count: int) -> Launch:
    threads = 32 * variant.number("warps")
    across = problem.across(threads, sm_count)
    tiles, parts = ceil_div(problem.totals, across), 1
    of_thread = ceil_div(problem.of_total * across, threads)
    if of_thread > 2 * _AT_ONCE:
        parts = max(1, min(ceil_div(of_thread, _AT_ONCE), sm_count // tiles))
    workspace = (parts - 1) * problem.totals * _OF_PART
    return Launch((tiles, parts, 1), problem.scalars(across, threads), workspace, zeroed=False)


KERNEL = Kernel(
    family=FAMILY_NAME,
    name=NAME,
    language="cuda",
    parameters=PARAMETERS,
    defaults=Space(tuple((("dtype", dtype),) for dtype in DTYPES), lambda kind: ((("warps", 8),),)),
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
