"""The variants of gated scan for contiguous time, and the choice among them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from gated_scan_time_last import KERNELS, chosen

from scan_registry.kernels.gated_scan import time_last
from scan_registry.kernels.gated_scan.problem import (
    HEADERS,
    STRIDED,
    Direction,
    GatedScanProblem,
    Strides,
)
from scan_registry.kernels.model import ITEM_SIZE


def test_copies_are_under_way_and_rings_fit() -> None:
    """At least 40 KB on an SM, whose shared memory holds what shares it."""
    for direction, kernel in KERNELS.items():
        for variant in kernel.every:
            statics = dict(variant.statics)
            if "stages" not in statics:
                continue
            ctas, lead = variant.number("blocks"), int(statics.get("prefix_lead", 1))
            stages = variant.number("rows") * (variant.number("stages") - lead)
            assert ctas * stages * time_last.copied(direction, variant) >= 40_000, variant
            assert ctas * (kernel.code.shared(variant) + 3072) <= 233_472, variant


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((8, 2560, 4096), "whole"),
        ((16, 1024, 2048), "whole"),
        ((1, 2048, 65_536), "whole"),
        ((1, 16, 65_536), "cut"),
        ((8, 2560, 4095), "generic"),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_cheapest_variant(shape: tuple[int, int, int], tile: str, direction: Direction) -> None:
    batch, channels, time = shape
    kernel = KERNELS[direction]
    row = Strides(0, channels * time, time, 1)
    problem = GatedScanProblem(
        direction=direction,
        layout="time_last",
        dtype="bfloat16",
        gates_dtype="bfloat16",
        outer=1,
        batch=batch,
        channels=channels,
        time=time,
        strides=(*(row,) * (len(STRIDED[direction]) - 1), Strides(0, channels, 1, 0)),
        alignment=16,
        kind="min_gru",
    )
    fits = [v for v in kernel.every if kernel.rules.accepts(v, problem) is None]
    best = min(fits, key=lambda variant: kernel.cost(variant, problem))
    assert best == chosen(direction, "bfloat16", "min_gru", tile)
    launch = kernel.launch(best, problem, 132)
    assert {p.name for p in kernel.parameters if p.kind == "i64"} <= set(launch.scalars)
    packed = replace(problem, sequences=2)
    assert [v.text("access") for v in fits if not kernel.rules.accepts(v, packed)] == ["generic"]


def test_every_kind_and_dtype_has_its_variants() -> None:
    for kernel in KERNELS.values():
        pairs = [
            (v.text("kind"), v.text("dtype")) for v in kernel.variants
        ]  # in float16 the generic one alone
        assert set(pairs) == set(product(HEADERS, ITEM_SIZE)) - {
            (header, wide) for header, wide in product(HEADERS, ("float64", "complex64"))
        }
        assert len(pairs) == len(HEADERS) * (2 * 2 + 1)
