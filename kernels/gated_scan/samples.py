"""The problems of gated scan that ``doctor`` checks: all problems of one kind, and the most usual ones of the other kinds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from scan_registry.kernels.gated_scan import problem
from scan_registry.kernels.linear_scan.problem import sample_facts
from scan_registry.kernels.model import Sample

#: The kind with all problems; and the dtype and access that the problems of the other kinds have.
_KIND, _DTYPE, _ACCESS = "min_gru", "bfloat16", "aligned"


def samples() -> tuple[Sample, ...]:
    """The problems, in every layout and direction."""
    return tuple(_samples())


def _samples() -> Iterator[Sample]:
    for kind, layout, direction in product(problem.HEADERS, problem.LAYOUTS, problem.DIRECTIONS):
        for dtype, access in product(problem.DTYPES, ("aligned", "generic")):
            if (dtype, access) == ("float16", "aligned"):
                continue  # without tuning, generic variants take these as well
            if kind == _KIND or (dtype, access) == (_DTYPE, _ACCESS):
                yield _sample(kind, layout, direction, dtype, access)


def _sample(
    kind: str, layout: problem.Layout, direction: problem.Direction, dtype: str, access: str
) -> Sample:
    facts = sample_facts(layout, dtype, access, len(problem.STRIDED[direction]) - 1)
    return Sample(problem.GatedScanProblem(direction=direction, kind=kind, **facts), dtype, access)
