"""The problems of gated scan that ``doctor`` asks about: of one kind all, of the others those that most people have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from scan_registry.kernels.gated_scan.problem import (
    DIRECTIONS,
    DTYPES,
    HEADERS,
    LAYOUTS,
    STRIDED,
    Direction,
    GatedScanProblem,
    Layout,
    Strides,
)
from scan_registry.kernels.model import ITEM_SIZE, Sample

#: The kind with all problems, and the dtype and access of the others'.
_KIND, _DTYPE, _ACCESS = "min_gru", "bfloat16", "aligned"


def samples() -> tuple[Sample, ...]:
    """Of every layout and direction."""
    return tuple(_samples())


def _samples() -> Iterator[Sample]:
    for kind, layout, direction in product(HEADERS, LAYOUTS, DIRECTIONS):
        for dtype, access in product(DTYPES, ("aligned", "generic")):
            if (dtype, access) == ("float16", "aligned"):
                continue  # without tuning, generic variants take these as well
            if kind == _KIND or (dtype, access) == (_DTYPE, _ACCESS):
                yield _sample(kind, layout, direction, dtype, access)


def _sample(kind: str, layout: Layout, direction: Direction, dtype: str, access: str) -> Sample:
    batch, channels, time = (8, 1024, 2048) if access == "aligned" else (8, 1021, 2039)
    strides = (
        Strides(0, channels * time, time, 1)
        if layout == "time_last"
        else Strides(0, channels * time, 1, channels)
    )
    problem = GatedScanProblem(
        direction=direction,
        layout=layout,
        dtype=dtype,
        gates_dtype=dtype,
        outer=1,
        batch=batch,
        channels=channels,
        time=time,
        strides=(*(strides,) * (len(STRIDED[direction]) - 1), Strides(0, channels, 1, 0)),
        alignment=16 if access == "aligned" else ITEM_SIZE[dtype],
        kind=kind,
    )
    return Sample(problem, dtype, access)
