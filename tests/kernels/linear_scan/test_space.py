"""What the linear_scan kernels can be tuned over, and how problems are compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from changing import changed

from scan_registry.hardware.target import SHARED_MEMORY, Target
from scan_registry.kernels.linear_scan import streams
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel, Variant, pinned
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
def test_a_space_is_a_few_dozen_variants_of_each_kind(kernel: Kernel) -> None:
    kinds = Counter(
        pinned(v.statics[:3]) for v in kernel.every if kernel.rules.serves(v.statics, SM90)
    )
    misaligned = 3 if kernel.language == "cuda" else 0
    varlen = 5 if misaligned and kernel.name.startswith("channel_last") else 0
    assert len(kinds) == 12 + misaligned + varlen
    assert max(kinds.values()) <= 90
    assert min(kinds.values()) >= 4
    assert len(set(kernel.every)) == len(kernel.every)
    for variant in kernel.every:
        assert kernel.allows(variant)
        assert Variant.parse(str(variant)) == variant
        assert 1 <= kernel.code.warps(variant) <= 32


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
    aligned, odd = a_problem(kernel.name), a_problem(kernel.name, alignment=4)
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
    odd = a_problem(kernel.name, time=4099, channels=1001)
    first, *others = odd.strides
    longer = replace(odd, strides=(replace(first, batch=first.batch + 1), *others))
    assert not longer.congruent()
    taken = "misaligned" if kernel.language == "cuda" else "generic"
    for problem, access in ((odd, taken), (longer, "generic"), (a_problem(kernel.name), "aligned")):
        assert f"access={access}" in kernel.tunable.shape(problem).kind
        accepting = {v.text("access") for v in kernel.every if not kernel.rules.accepts(v, problem)}
        assert accepting == {access, "generic"}
    for problem in (replace(odd, sequences=2), replace(odd, gates_dtype="bfloat16")):
        taking = [v for v in kernel.every if not kernel.rules.accepts(v, problem)]
        assert all(v.text("access") == "generic" for v in taking)


def test_how_full_segments_are() -> None:
    kernel = FAMILY.kernel("channel_last_backward", "cuda")
    cut = next(v for v in kernel.every if "prefix_lead" in dict(v.statics))
    tile = dict(cut.statics)
    assert isinstance(tile["warps"], int)
    segment = tile["warps"] * streams.times(cut)
    for time, full in ((segment, 1), (segment + 1, 0.5), (segment / 4, 0.25), (3 * segment, 1)):
        assert kernel.tunable.tile_efficiency(str(cut), {"time": time}) == pytest.approx(
            full, rel=0.01
        )
    whole = next(v for v in kernel.every if "prefix_lead" not in dict(v.statics))
    assert kernel.tunable.tile_efficiency(str(whole), {"time": segment + 1}) == 1
    # Of variants of other versions selection knows nothing yet.
    for unknown in ("lanes=0", "lanes=x", "width=2"):
        text = str(cut).replace(f"lanes={tile['lanes']}", unknown)
        assert kernel.tunable.tile_efficiency(text, {"time": segment + 1}) == 1
    assert kernel.tunable.tile_efficiency(f"{cut},", {"time": segment + 1}) == 1


def test_kernels_count_the_bytes_that_launches_do() -> None:
    headers = (*FAMILY.folder.glob("*.cuh"), *FAMILY.folder.with_name("common").glob("*.cuh"))
    sources = {path.name: path.read_text(encoding="utf-8") for path in headers}
    assert f"COUNTER = {streams.COUNTER} }};" in sources["multi_cta_column.cuh"]
    assert f"HEAD = {streams.HEAD} }};" in sources["workspace_init.cuh"]
    assert f"LINE = {streams.LINE} / sizeof(Storage)," in sources["time_stream.cuh"]
    assert f"LEAST_GROUP = {streams.LEAST_GROUP} }};" in sources["lookback.cuh"]


def test_sizes() -> None:
    kernel = FAMILY.kernel("channel_last_forward", "cuda")
    assert kernel.tunable.shape is not None
    problem = a_problem("channel_last_forward")
    plain = kernel.tunable.shape(problem).sizes
    assert plain == {"lines": 128, "channels": 64, "time": 4096, "sequences": 1, "broadcast": 1}
    varlen = kernel.tunable.shape(replace(problem, sequences=8)).sizes
    assert (varlen["time"], varlen["sequences"]) == (512, 8)
    gates, *others = problem.strides
    broadcast = replace(problem, strides=(replace(gates, time=0), *others))
    assert kernel.tunable.shape(broadcast).sizes["broadcast"] > 1
    assert kernel.tunable.shape(replace(problem, time=0)).sizes["time"] == 1


def test_tiles_much_longer_than_a_sequence_are_not_worth_a_try() -> None:
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    short, long, longest = a_problem(time=64), a_problem(time=65536), a_problem(time=1 << 24)
    timed = [
        sum(kernel.tunable.worth(v, each) for v in kernel.every) for each in (short, long, longest)
    ]
    assert 0 < timed[0] < timed[1]
    assert 0 < timed[2] < timed[1]  # some would take a million tiles


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_columns_are_read_at_once_by_as_many_blocks_as_there_is_room_for(dtype: str) -> None:
    kernel = FAMILY.kernel("channel_last_forward", "cuda")
    pins = {"dtype": dtype, "single_wave": 1}.items()
    variant = next(v for v in kernel.every if pins <= dict(v.statics).items())
    warps, steps = variant.number("warps"), variant.number("steps")
    channels = 32 * variant.number("vector")
    small = replace(
        a_problem(kernel.name, channels=2 * channels), dtype=dtype, gates_dtype=dtype, batch=3
    )
    assert kernel.rules.accepts(variant, small) is None
    for sm_count, time, ctas, run in (
        (12, 4096, 1, -(-4096 // (warps * steps)) * steps),
        (132, 1 << 16, 21, -(-(1 << 16) // (21 * warps * steps)) * steps),
        (132, 2 * warps * steps, 2, steps),  # no part is less than a tile for each warp
        (132, 23 * warps * steps, 12, 2 * steps),  # and none is empty
        (132, 0, 1, 0),
    ):
        launch = kernel.launch(variant, replace(small, time=time), sm_count)
        assert launch.grid == (2, 3, 1 + ctas if ctas > 1 else 1)
        assert launch.scalars["flags"] >> 2 == run
        assert ctas * warps * run >= time
        told = (8 if dtype == "bfloat16" else 16) * 6 * (ctas - 1) * channels
        assert launch.workspace == (streams.HEAD + told if ctas > 1 else 0)
        assert launch.zeroed == (ctas == 1)
    assert kernel.rules.exceeds_residency(variant, small, 6) is None
    assert "6 blocks share 6 columns, and 5 run at once" in str(
        kernel.rules.exceeds_residency(variant, small, 5)
    )
    assert (
        kernel.tunable.tile_efficiency(str(variant), {"time": 1e4, "channels": 2 * channels}) == 1
    )
    assert (
        kernel.tunable.tile_efficiency(str(variant), {"time": 1e4, "channels": 8}) == 8 / channels
    )
    assert "201326592 bytes of gates and tokens" in str(
        kernel.rules.accepts(variant, replace(small, time=1 << 17))
    )


@pytest.mark.parametrize("ctas", [3, 4, 8])
def test_blocks_share_columns_where_all_of_them_run_at_once(ctas: int) -> None:
    kernel = FAMILY.kernel("channel_last_forward", "cuda")
    variant = next(v for v in kernel.every if dict(v.statics).get("ctas_per_column") == ctas)
    dtype = variant.text("dtype")
    problem = replace(
        a_problem("channel_last_forward", channels=1000), dtype=dtype, gates_dtype=dtype
    )
    assert kernel.rules.accepts(variant, problem) is None
    blocks = 2 * 16 * ctas
    assert kernel.rules.exceeds_residency(variant, problem, blocks) is None
    crowded = kernel.rules.exceeds_residency(variant, problem, blocks - 1)
    assert crowded is not None
    assert f"{blocks} blocks share 32 columns, and {blocks - 1} run at once" in crowded
    launch = kernel.launch(variant, problem, blocks)
    assert launch.grid[0] == blocks
    turns = 2 * (variant.number("aggregate_lead") + 1)
    assert launch.workspace == 256 + 8 * blocks * 64 * turns
