"""Which tiles the kernels of gated_scan for contiguous channels have, and which a problem gets where no tuning speaks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from planned import jobs_of

from scan_registry.hardware.target import RELEASED, SHARED_MEMORY, Target
from scan_registry.kernels.gated_scan.channel_last import kernels
from scan_registry.kernels.gated_scan.problem import (
    DIRECTIONS,
    HEADERS,
    LAYOUTS,
    STRIDED,
    Direction,
    GatedScanProblem,
    Strides,
)
from scan_registry.kernels.model import Kernel, Variant

KERNELS = {kernel.name.removeprefix("channel_last_"): kernel for kernel in kernels()}
#: SMs of an H100 or H200.
SM_COUNT = 132


def posed(
    direction: Direction, batch: int, time: int, channels: int, dtype: str, **others: Any
) -> GatedScanProblem:
    plane = Strides(0, channels * time, 1, channels)
    return GatedScanProblem(
        *(direction, "channel_last", dtype, dtype),
        *(1, batch, channels, time),
        strides=(*(plane,) * (len(STRIDED[direction]) - 1), Strides(0, channels, 1, 0)),
        alignment=16,
        **{"kind": "min_gru", **others},
    )


def cheapest(kernel: Kernel, among: Iterable[Variant], problem: GatedScanProblem) -> Variant:
    can = [
        variant
        for variant in among
        if kernel.rules.accepts(variant, problem) is None
        and kernel.rules.exceeds_residency(variant, problem, SM_COUNT) is None
    ]
    return min(can, key=lambda variant: kernel.cost(variant, problem))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_odd_rows_packed_sequences_and_float16_are_for_the_generic_tile(
    direction: Direction,
) -> None:
    kernel = KERNELS[direction]
    for problem in (
        posed(direction, 2, 100, 2049, "bfloat16"),
        posed(direction, 1, 100, 2048, "bfloat16", sequences=3),
        posed(direction, 8, 4096, 2560, "float16"),
    ):
        assert cheapest(kernel, kernel.variants, problem).text("access") == "generic"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_enough_is_on_its_way_and_fits(direction: Direction) -> None:
    """Copies of at least 32 KB for each SM, in the shared memory that one has."""
    kernel = KERNELS[direction]
    hopper = Target((9, 0), "sm")
    for variant in kernel.every:
        tile, ring = dict(variant.statics), kernel.code.shared(variant)
        if "stages" not in tile:
            assert ring == 0
            continue
        ahead = int(tile["stages"]) - 1 - int(tile.get("aggregate_lead", 0))
        assert ring // int(tile["stages"]) * ahead * int(tile["blocks"]) >= 32_000, variant
        assert kernel.rules.serves(variant.statics, hopper), variant
        assert ring * int(tile["blocks"]) <= SHARED_MEMORY[9, 0], variant
        if "ctas_per_column" not in tile:
            assert kernel.rules.serves(variant.statics, Target((8, 0), "sm")), variant


def test_a_launch_makes_no_more_parts_than_there_may_be() -> None:
    kernel = KERNELS["backward"]
    for time in (1, 31, 32, 64, 65, 100, 1000, 4096):
        for kind in HEADERS:
            problem = posed("backward", 3, time, 72, "bfloat16", kind=kind)
            for variant in kernel.every:
                if kernel.rules.accepts(variant, problem) is None:
                    parts = kernel.launch(variant, problem, SM_COUNT).scalars["parts"]
                    assert problem.batch <= parts <= problem.most_parts, variant


@pytest.mark.parametrize("arch", RELEASED)
def test_wheels_stay_small_and_take_every_problem(arch: str) -> None:
    """In float32 and bfloat16, in both layouts; aligned access for GPUs with high-bandwidth memory."""
    held = [
        job.variant for job in jobs_of(Target.parse(arch)) if job.variant.family == "gated_scan"
    ]
    assert len(held) <= 120
    assert {variant.language for variant in held} == {"cuda"}
    aligned = arch in ("sm80", "sm90", "sm100")
    found = {(v.kernel, v.text("dtype"), v.text("kind"), v.text("access")) for v in held}
    kernels = (f"{layout}_{way}" for layout, way in product(LAYOUTS, DIRECTIONS))
    accesses = ("aligned", "generic") if aligned else ("generic",)
    assert found == set(product(kernels, ("float32", "bfloat16"), HEADERS, accesses))
