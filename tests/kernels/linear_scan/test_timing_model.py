"""The timing models of linear_scan's kernels."""

from __future__ import annotations

import math

import pytest

from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.linear_scan.timing_model import (
    COEFFICIENTS,
    geometry,
    milliseconds,
    predicted,
    work_of,
)
from scan_registry.kernels.model import Kernel
from scan_registry.kernels.tuning import Shape

KERNELS = [k for k in FAMILY.kernels if k.language == "cuda" and k.tunable.shape is not None]
KIND = "dtype=float32,gates=float32,access=aligned"
MANY = Shape(KIND, {"lines": 4096.0, "time": 4096.0, "sequences": 1, "broadcast": 1.0})


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_tuning_of_an_architecture_has_its_model(kernel: Kernel) -> None:
    for tuning in kernel.tunable.tunings():
        assert set(tuning.model["gpu"]) == {"sm_count", "bandwidth"}
        designs = {k: v for k, v in tuning.model.items() if k != "gpu"}
        assert designs
        assert all(tuple(of) == COEFFICIENTS for of in designs.values())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_models_are_near_what_was_measured(kernel: Kernel) -> None:
    """Of variants that are within twice the fastest, which selection has to tell apart."""
    errors = []
    for tuning in kernel.tunable.tunings():
        for kind in tuning.kinds:
            for row in tuning.rows(kind):
                for label, ms in row.times.items():
                    text = f"{kernel.head}:{label}"
                    of = Shape(kind, row.sizes)
                    found = predicted(tuning.model, text, of, tuning.sm_count)
                    if found is not None and ms < 2 * min(row.times.values()):
                        errors.append(abs(math.log(found / ms)))
    assert len(errors) > 50
    assert sorted(errors)[len(errors) // 2] < 0.1
    assert sorted(errors)[int(0.95 * len(errors))] < 0.35


def test_what_no_model_is_for_has_no_estimate() -> None:
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    (tuning, *_) = kernel.tunable.tunings()
    ok = f"{kernel.head}:{KIND},warps=4,rows=1,steps=2"
    there = predicted(tuning.model, ok, MANY, 132)
    assert there
    for text in (
        ok.replace("float32", "float64"),
        ok.replace("float32", "bfloat16"),
        ok.replace("aligned", "misaligned"),
        ok.replace("float32", "float3"),
        ok.replace(",steps=2", ""),
        "nonsense",
    ):
        assert predicted(tuning.model, text, MANY, 132) is None
    assert predicted({}, ok, MANY, 132) is None
    for size, value in (("lines", 0), ("sequences", 2)):
        of = Shape(KIND, {**MANY.sizes, size: value})
        assert predicted(tuning.model, ok, of, 132) is None
    wide = Shape(KIND.replace("float32", "float64"), MANY.sizes)
    assert predicted(tuning.model, ok.replace("float32", "float64"), wide, 132) is None
    # Generic access is for all problems of its dtypes.
    generic = predicted(tuning.model, ok.replace("aligned", "generic"), MANY, 132)
    assert generic
    assert generic > there


def test_work_is_counted_as_kernels_do_it() -> None:
    """A CTA of four rows, on four SMs with two each."""
    text = (
        "linear_scan.time_last_backward:cuda:dtype=bfloat16,gates=bfloat16,access=aligned,"
        "warps=1,rows=4,lanes=32,pieces=2,stages=3,blocks=2"
    )
    of = geometry(text)
    assert of is not None
    assert (of.design, of.across, of.times, of.held, of.depth) == ("rows", 4, 512, 16, 2)
    sizes = {"lines": 40.0, "time": 1000.0, "sequences": 1, "broadcast": 1.0}
    work = work_of(of, sizes, 4, 1e6)
    assert work.dram == pytest.approx(5 * 40 * 1000 * 2 / 1e6)
    assert work.elements == 10 / 4 * 2 * 4 * 512  # ten CTAs of two tiles
    assert (work.turns, work.missing) == (10 / 8 * 2, 3 / 4 * 2 * 1)
    alone = work_of(of, {**sizes, "lines": 20.0}, 4, 1e6)
    assert (alone.elements, alone.turns, alone.missing) == (2 * 2 * 4 * 512, 2, 0)
    broadcast = work_of(of, {**sizes, "broadcast": 16.0}, 4, 1e6)
    assert broadcast.dram == pytest.approx(0.8 * work.dram)
    narrow = work_of(of, {**sizes, "time": 32.0}, 4, 1e6)
    assert (work.narrow, narrow.narrow) == (0, 3)


def test_tiles_of_generic_columns_wait_for_those_before() -> None:
    of = geometry(
        "linear_scan.channel_last_forward:cuda:dtype=float32,gates=float32,access=generic,"
        "warps=8,lanes=4,vector=1,steps=8"
    )
    assert of is not None
    assert (of.design, of.across, of.times, of.held) == ("generic", 4, 512, 8)
    sizes = {"lines": 12.0, "channels": 6.0, "time": 5120.0, "sequences": 1, "broadcast": 1.0}
    work = work_of(of, sizes, 8, 1e6)  # four columns of ten tiles
    assert (work.turns, work.missing) == (10, 0)
    assert work.elements == 40 / 8 * 4 * 512


def test_the_slowest_of_what_overlaps_decides() -> None:
    nothing = dict.fromkeys(COEFFICIENTS, 0.0)
    of = geometry(
        "linear_scan.channel_last_forward:cuda:dtype=float32,gates=float32,access=aligned,"
        "warps=8,lanes_across=32,vector=1,steps=8,stages=3,blocks=2"
    )
    assert of is not None
    sizes = {"lines": 2048.0, "channels": 1024.0, "time": 640.0, "sequences": 1, "broadcast": 1.0}
    work = work_of(of, sizes, 16, 1e6)
    dram = 3 * 2048 * 640 * 4 / 1e6
    assert milliseconds(work, {**nothing, "call": 1.0, "dram": 1.0}) == pytest.approx(1 + dram)
    assert milliseconds(work, {**nothing, "tile": 1.0}) == pytest.approx(10 * 2)  # two waves
    both = milliseconds(work, {**nothing, "dram": 1.0, "tile": dram / 20})
    assert dram < both < 1.2 * dram
