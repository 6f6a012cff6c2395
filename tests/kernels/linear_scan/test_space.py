"""What the linear_scan kernels can be tuned over, and how problems are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from changing import changed

from scan_registry.hardware.target import SHARED_MEMORY, Target
from scan_registry.kernels.linear_scan import streams
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel, Variant
from scan_registry.kernels.tuning import Row, Tuning

#: Bytes of shared memory that a block may have on GPUs that wheels are built for.
ROOMS = [room for capability, room in SHARED_MEMORY.items() if capability >= (8, 0)]

SM90 = Target((9, 0))
TUNED = [kernel for kernel in FAMILY.kernels if kernel.tunable.space.kinds]
IDS = [kernel.head for kernel in TUNED]


def a_problem(
    kernel: str = "time_last_forward", time: int = 4096, channels: int = 64, alignment: int = 16
) -> LinearScanProblem:
    layout, direction = kernel.rsplit("_", 1)
    strides = (
        Strides(0, channels * time, time, 1)
        if layout == "time_last"
        else Strides(0, channels * time, 1, channels)
    )
    count = {"forward": 3, "backward": 4}[direction]
    return LinearScanProblem(
        direction=direction,  # type: ignore[arg-type]
        layout=layout,  # type: ignore[arg-type]
        dtype="float32",
        gates_dtype="float32",
        outer=1,
        batch=2,
        channels=channels,
        time=time,
        strides=(*(strides,) * count, Strides(0, channels, 1, 0)),
        alignment=alignment,
    )


def test_scans_are_tuned_and_reductions_are_not() -> None:
    assert {kernel.name for kernel in TUNED} == {
        f"{layout}_{direction}"
        for layout in ("time_last", "channel_last")
        for direction in ("forward", "backward")
    }


CUT = ("time_last_forward", "time_last_backward", "channel_last_forward", "channel_last_backward")


@pytest.mark.parametrize("name", CUT)
def test_few_long_scans_are_cut_on_gpus_with_little_shared_memory(name: str) -> None:
    """Machine code is compiled for GPUs that have room for it; and of what a table has timed, some is small."""
    kernel = FAMILY.kernel(name, "cuda")
    cut = [v for v in kernel.every if "prefix_lead" in dict(v.statics)]
    for target in (Target((8, 6)), Target((8, 0), "compute")):
        serving = [v for v in cut if kernel.rules.serves(v.statics, target)]
        assert 0 < len(serving) < len(cut)
        assert all(kernel.code.shared(variant) < min(ROOMS) for variant in serving)
    assert all(kernel.rules.serves(variant.statics, SM90) for variant in cut)


@pytest.mark.parametrize("kernel", TUNED, ids=IDS)
def test_without_tables_wheels_hold_the_defaults(kernel: Kernel) -> None:
    untuned = changed(kernel, tunings=tuple)
    assert untuned.variants == tuple(untuned.by_text.values())


def test_wheels_hold_what_a_table_names() -> None:
    kernel = FAMILY.kernel("time_last_forward", "triton")
    extra = next(v for v in kernel.every if v not in kernel.by_text.values() and v.statics[-1][1])
    assert dict(extra.statics)["reverse"] == 1
    assert "reverse" not in kernel.label(extra)
    tuning = Tuning.of(
        "sm_90", "x", "d", {"kind": [Row({"time": 1}, {kernel.label(extra): 1.0, "gone=1": 2.0})]}
    )
    tuned = changed(kernel, tunings=lambda: (tuning,))
    added = tuned.variants[len(kernel.by_text) :]
    assert tuned.variants[: len(kernel.by_text)] == tuple(kernel.by_text.values())
    # Both ways: which one it is, is the problem's.
    assert {dict(variant.statics)["reverse"] for variant in added} == {0, 1}
    assert {kernel.label(variant) for variant in added} == {kernel.label(extra)}


def test_what_is_in_no_space_is_not_allowed() -> None:
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    variant = kernel.every[0]
    head, statics = str(variant).rsplit(":", 1)
    for text in (
        f"{head}:{statics.replace('warps=', 'warps=9')}",
        f"{head}:{statics},more=1",
        f"{head}:{statics.split(',', 1)[1]}",
        str(variant).replace("forward", "backward"),
        str(variant).replace("cuda", "triton"),
    ):
        assert not kernel.allows(Variant.parse(text))


@pytest.mark.parametrize("kernel", TUNED, ids=IDS)
def test_kinds_tell_aligned_problems_from_others(kernel: Kernel) -> None:
    assert kernel.tunable.shape is not None
    aligned = a_problem(kernel.name)
    # Batches that do not fold into one dimension, in a dtype of 8 bytes.
    wide = {"dtype": "float64", "gates_dtype": "float64"}
    odd = replace(a_problem(kernel.name, alignment=4), outer=2, **wide)
    assert "access=aligned" in kernel.tunable.shape(aligned).kind
    assert "access=generic" in kernel.tunable.shape(odd).kind
    for problem, access in ((aligned, "aligned"), (odd, "generic")):
        timed = [
            v
            for v in kernel.every
            if not kernel.rules.accepts(v, problem) and kernel.tunable.worth(v, problem)
        ]
        assert len(timed) > 3
        assert {v.text("access") for v in timed} == {access}


@pytest.mark.parametrize("kernel", TUNED, ids=IDS)
def test_rows_that_start_anywhere_have_kernels_of_their_own(kernel: Kernel) -> None:
    """If an element lies at the same place of its 16 bytes in every tensor."""
    assert kernel.tunable.shape is not None
    odd = replace(a_problem(kernel.name, time=4099, channels=1001), batch=8)
    first, *others = odd.strides
    longer = replace(odd, strides=(replace(first, batch=first.batch + 1), *others))
    assert not longer.congruent()
    taken = "misaligned" if kernel.language == "cuda" else "generic"
    elementwise = kernel.language == "cuda" and kernel.name.startswith("channel_last")
    any_address = "scalar" if elementwise else "generic"
    for problem, access in (
        (odd, taken),
        (longer, any_address),
        (a_problem(kernel.name), "aligned"),
    ):
        assert f"access={access}" in kernel.tunable.shape(problem).kind
        accepting = {v.text("access") for v in kernel.every if not kernel.rules.accepts(v, problem)}
        assert accepting == {access, "generic"}
    cut = kernel.language == "cuda" and kernel.name.startswith("time_last")
    for problem, others in (
        (replace(odd, sequences=2), {"varlen"} if cut else set()),
        (replace(odd, gates_dtype="bfloat16"), set()),
    ):
        accepting = {v.text("access") for v in kernel.every if not kernel.rules.accepts(v, problem)}
        assert accepting <= {"generic", *others}
        assert others <= accepting


@pytest.mark.parametrize("kernel", [k for k in TUNED if k.language == "cuda"], ids=lambda k: k.name)
def test_few_segments_are_numbered_by_cta(kernel: Kernel) -> None:
    """Then a further CTA zeroes the workspace, in place of the host."""
    cut = next(v for v in kernel.every if {"prefix_lead", "stages"} <= {*dict(v.statics)})
    problem = replace(a_problem(kernel.name, time=1 << 17, channels=8), batch=1)
    many = kernel.launch(cut, problem, 1)
    assert (many.grid, many.zeroed) == ((cut.number("blocks"), 1, 1), True)
    few = kernel.launch(cut, problem, 1 << 20)
    segments = few.grid[0] - 1
    assert segments > 1
    assert not few.zeroed
    for sm_count, zeroed in ((segments, True), (segments + 1, False)):
        launch = kernel.launch(cut, problem, sm_count)
        assert (launch.grid[0], launch.zeroed) == (sm_count, zeroed)


def test_kernels_count_the_bytes_that_launches_do() -> None:
    headers = (*FAMILY.folder.glob("*.cuh"), *FAMILY.folder.with_name("common").glob("*.cuh"))
    sources = {path.name: path.read_text(encoding="utf-8") for path in headers}
    assert f"COUNTER = {streams.COUNTER} }};" in sources["multi_cta_column.cuh"]
    assert f"HEAD = {streams.HEAD} }};" in sources["workspace_init.cuh"]
    assert f"LINE = {streams.LINE} / sizeof(Storage)," in sources["time_stream.cuh"]
    assert f"LEAST_GROUP = {streams.LEAST_GROUP} }};" in sources["lookback.cuh"]
