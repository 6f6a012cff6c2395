"""Selection by what tuning found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from changing import changed
from imaginary import COMPILERS, FAMILY
from selecting import (
    CODE,
    CUDA,
    KERNEL,
    TRITON,
    Describe,
    Factory,
    Make,
    a_problem,
    binary_of,
    decide,
    in_memory,
    plain,
    told,
    variant_of,
)

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.dispatch import select as select_module
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import NoKernelError, System, select
from scan_registry.kernels.linear_scan.timing_model import COEFFICIENTS
from scan_registry.kernels.model import Variant
from scan_registry.kernels.tuning import Row, Tuning

#: In no wheel.
SPARE = next(v for v in CODE if plain(v) and v not in CUDA)


def a_tuning(
    arch: str = "sm_90", rows: Iterable[tuple[float, Mapping[Variant, float]]] = ()
) -> Tuning:
    """Of the float32 kernel on aligned problems, by time."""
    kernel = FAMILY.kernel(KERNEL, "cuda")
    assert kernel.tunable.shape is not None
    shape = kernel.tunable.shape(a_problem())
    created = [
        Row({**shape.sizes, "time": time}, {kernel.label(v): ms for v, ms in times.items()})
        for time, times in rows
    ]
    return Tuning.of(arch, "Imaginary", "2026-01-31", {shape.kind: created})


def for_gpu(tuning: Tuning, gpu: str) -> Tuning:
    return replace(tuning, gpu=gpu, exclusive=True)


def tuned_archive(arch: str, binaries: Iterable[Binary], *tunings: Tuning) -> Archive:
    archive = in_memory(arch, binaries)
    archive.__dict__["tuned"] = {FAMILY.kernel(KERNEL, "cuda").head: tunings}
    return archive


def aligned() -> list[Variant]:
    """The float32 variants for aligned problems; the spec likes the last most where T is 1024."""
    problem = a_problem()
    kernel = FAMILY.kernel(KERNEL, "cuda")
    result = [v for v in CUDA if plain(v) and kernel.rules.accepts(v, problem) is None]
    return sorted(result, key=lambda v: -kernel.cost(v, problem))


def test_the_nearest_row_decides(a_binary: Make, a_device: Describe) -> None:
    slow, *_, liked = aligned()
    rows = [(1024, {slow: 0.1, liked: 0.2}), (65536, {liked: 3.0, slow: 4.0})]
    archive = tuned_archive("sm90", [a_binary(v)[0] for v in CUDA], a_tuning(rows=rows))
    near = decide(a_device(), [archive])
    assert variant_of(near.winner) == slow
    assert near.winner is not None
    assert near.winner.tuned is not None
    assert (near.winner.ms, near.winner.tuned.local) == (0.1, False)
    assert "tuning found the winner faster (0.1 ms against 0.2)" in told(near, str(liked))
    others = [v for v in aligned() if v not in (slow, liked)]
    assert "names the winner, and not this" in told(near, str(others[0]))
    far = decide(a_device(), [archive], a_problem(30_000))
    assert variant_of(far.winner) == liked
    untold = decide(a_device(), [archive], a_problem(alignment=4))
    assert untold.winner is not None
    assert (untold.winner.tuned, untold.winner.ms) == (None, None)
    assert "the spec prefers" in json.dumps([asdict(loser) for loser in untold.rejected])


def test_a_gpu_goes_by_its_own_rows_where_no_others_are_nearer(
    a_binary: Make, a_device: Describe
) -> None:
    slow, other, *_, liked = aligned()
    general = a_tuning(rows=[(1024, {slow: 0.1, liked: 0.2}), (65536, {slow: 0.1, liked: 0.2})])
    own = for_gpu(a_tuning(rows=[(1024, {liked: 0.1, slow: 0.3})]), "NVIDIA H100")
    foreign = for_gpu(a_tuning(rows=[(1024, {other: 0.1})]), "NVIDIA H100 PCIe")
    binaries = [a_binary(v)[0] for v in CUDA]
    for order in ((general, own, foreign), (foreign, own, general)):
        archive = tuned_archive("sm90", binaries, *order)
        for gpu, time, expected in (
            ("NVIDIA H100", 1024, liked),
            ("NVIDIA H100", 65536, slow),
            ("NVIDIA H200", 1024, slow),
            ("NVIDIA H100 PCIe", 1024, other),
        ):
            device = replace(a_device(), name=gpu)
            assert variant_of(decide(device, [archive], a_problem(time)).winner) == expected
    alone = tuned_archive("sm90", binaries, foreign)
    winner = decide(replace(a_device(), name="NVIDIA H200"), [alone]).winner
    assert winner is not None
    assert winner.tuned is None


def test_a_variant_that_fills_less_of_its_segments_counts_as_slower(
    a_binary: Make, a_device: Describe
) -> None:
    cut = next(v for v in aligned() if "prefix_lead" in dict(v.statics))
    other = next(v for v in aligned() if "prefix_lead" not in dict(v.statics))
    rows = [(8192, {cut: 1.0, other: 1.1})]
    archive = tuned_archive("sm90", [a_binary(v)[0] for v in (cut, other)], a_tuning(rows=rows))
    for time, counts, liked in (
        (8192, 1.0, cut),
        (16384, 1.0, cut),
        (7800, 8192 / 7800, cut),
        (8200, 10240 / 8200, other),  # five segments of 2048
    ):
        winner = decide(a_device(), [archive], a_problem(time)).winner
        assert winner is not None
        assert winner.tuned is not None
        kernel = FAMILY.kernel(KERNEL, "cuda")
        assert variant_of(winner) == liked
        assert winner.tuned.ms(kernel, str(cut)) == pytest.approx(counts)
        assert winner.tuned.ms(kernel, str(other)) == 1.1


def with_model(tuning: Tuning) -> Tuning:
    """With a model by which segments take a fixed time, and others as long as they have bytes."""
    nothing = dict.fromkeys(COEFFICIENTS, 1e-12)
    gpu = {"sm_count": 132, "bandwidth": 1e9}
    registers, segments = {**nothing, "dram": 1.0}, {**nothing, "call": 1.0}
    return replace(tuning, model={"gpu": gpu, "registers": registers, "segments": segments})


def test_a_timing_model_scales_a_near_row_and_decides_alone_where_all_are_far(
    a_binary: Make, a_device: Describe
) -> None:
    cut = next(v for v in aligned() if "prefix_lead" in dict(v.statics))
    whole = next(v for v in aligned() if "stages" not in dict(v.statics))
    tuning = a_tuning(rows=[(1024, {cut: 0.1, whole: 0.09}), (65536, {cut: 3.0})])
    binaries = [a_binary(v)[0] for v in (cut, whole)]
    kernel = FAMILY.kernel(KERNEL, "cuda")
    plain, modelled = (tuned_archive("sm90", binaries, t) for t in (tuning, with_model(tuning)))
    device = a_device()
    for time, rule, liked in (
        (1024, "row", whole),
        (2000, "scaled_row", cut),  # others take longer there, and segments do not
        (64, "timing_model", whole),
        (8192, "timing_model", whole),  # far from both rows, of which the nearest does not name it
        (60_000, "timing_model", whole),  # the row is near, but does not name it
        (65_536, "row", cut),
    ):
        problem = a_problem(time)
        winner = decide(device, [modelled], problem).winner
        assert winner is not None
        assert (winner.rule, variant_of(winner)) == (rule, liked)
        again = decide(device, [modelled], problem).winner
        assert again is not None
        assert (variant_of(again), again.ms) == (liked, winner.ms)
        assert winner.tuned is not None
        estimate = winner.tuned.estimate(kernel, str(liked))
        assert (winner.ms == estimate) == (rule == "timing_model")
    assert "the timing model estimates the winner faster" in told(
        decide(device, [modelled], a_problem(64)), str(cut)
    )
    untold = decide(device, [plain], a_problem(64)).winner
    assert untold is not None
    assert (untold.rule, variant_of(untold), untold.ms) == ("scaled_row", whole, 0.09)
    # Another architecture's model says nothing.
    foreign = tuned_archive("sm90", binaries, replace(with_model(tuning), arch="sm_80"))
    winner = decide(device, [foreign], a_problem(64)).winner
    assert winner is not None
    assert winner.rule == "scaled_row"


def test_those_that_rank_after_the_winner_are_looked_at_when_somebody_asks(
    a_binary: Make, a_device: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call has no time for them."""
    slow, *_, liked = aligned()
    tuning = a_tuning(rows=[(1024, {slow: 0.1, liked: 0.2})])
    archive = tuned_archive("sm90", [a_binary(v)[0] for v in CUDA], tuning)
    seen: list[str] = []
    real = select_module.checked
    monkeypatch.setattr(
        select_module, "checked", lambda *inputs: seen.append(inputs[2].text) or real(*inputs)
    )
    decision = decide(a_device(), [archive])
    assert variant_of(decision.winner) == slow
    assert seen == [str(slow)]
    best = binary_of(decision.winner).sha256
    second = decide(a_device(), [archive], denied={best: "denied: it races"})
    assert variant_of(second.winner) == liked
    assert seen[1:] == [str(slow), str(liked)]
    assert told(second, str(slow)) == "denied: it races"
    assert len(decision.rejected) == len(CUDA)  # the others and the reference


def test_a_row_for_another_architecture(a_binary: Make, a_device: Describe) -> None:
    """It counts where there is no other, and its variants have to fit all the same."""
    slow, *_, liked = aligned()
    row = [(1024, {slow: 0.1, liked: 0.2})]
    binaries = [a_binary(v, "sm90")[0] for v in CUDA]
    device = a_device(shared_memory_per_block=1000)
    small = [replace(b, static_shared=0) if b.variant == liked else b for b in binaries]
    decision = decide(device, [tuned_archive("sm90", small, a_tuning("sm_100", row))])
    assert variant_of(decision.winner) == liked
    assert decision.winner is not None
    assert decision.winner.tuned is not None
    assert decision.winner.tuned.tuning.arch == "sm_100"
    assert "bytes of shared memory" in told(decision, str(slow))
    both = tuned_archive(
        "sm90", binaries, a_tuning("sm_100", row), a_tuning(rows=[(9999, {liked: 1.0})])
    )
    assert variant_of(decide(a_device(), [both]).winner) == liked


def test_what_was_tuned_here_comes_first(a_binary: Make, a_device: Describe) -> None:
    slow, middle, *_, liked = aligned()
    shipped = tuned_archive(
        "sm90", [a_binary(v)[0] for v in CUDA], a_tuning(rows=[(1024, {liked: 1.0, slow: 2.0})])
    )
    local = tuned_archive(
        "sm90", [a_binary(SPARE)[0]], a_tuning(rows=[(1024, {SPARE: 0.5, middle: 0.6})])
    )
    decision = decide(a_device(), [shipped], tuned=local)
    assert variant_of(decision.winner) == SPARE
    assert decision.winner is not None
    assert decision.winner.archive is local
    assert decision.winner.tuned is not None
    assert decision.winner.tuned.local
    # The row is the machine's for the wheel's variants, too; a nearer one of the wheel's counts.
    assert "(0.5 ms against 0.6)" in told(decision, str(middle))
    local.__dict__["tuned"] = {
        FAMILY.kernel(KERNEL, "cuda").head: (a_tuning(rows=[(65536, {SPARE: 0.5})]),)
    }
    assert variant_of(decide(a_device(), [shipped], tuned=local).winner) == liked


def test_what_was_tuned_here_and_is_damaged_counts_as_missing(
    archive_factory: Factory, a_device: Describe, a_binary: Make, tmp_path: Path
) -> None:
    liked = aligned()[-1]
    shipped = tuned_archive("sm90", [a_binary(v)[0] for v in CUDA])
    broken = tmp_path / "sm90.scanreg"
    broken.write_bytes(b"broken")
    decision = decide(a_device(), [shipped], tuned=Archive(broken))
    assert variant_of(decision.winner) == liked
    assert any(loser.damaged for loser in decision.rejected)


def test_rows_that_are_not_right_count_as_missing(a_binary: Make, a_device: Describe) -> None:
    kind = next(iter(a_tuning(rows=[(1, {SPARE: 1.0})]).kinds))
    wrong = Tuning("sm_90", "x", "d", [], [], {kind: "[3]"})
    decision = decide(a_device(), [tuned_archive("sm90", [a_binary(v)[0] for v in CUDA], wrong)])
    assert variant_of(decision.winner) == aligned()[-1]
    assert decision.taken().tuned is None


def test_what_is_compiled_here_goes_by_the_specs_tables(a_device: Describe) -> None:
    kernel = FAMILY.kernel(KERNEL, "cuda")
    tuning = a_tuning(rows=[(1024, {SPARE: 0.5})])
    tuned = changed(kernel, tunings=lambda: (tuning,))
    family = replace(FAMILY, kernels=(tuned, *(k for k in FAMILY.kernels if k is not kernel)))
    there = System(a_device(), toolchains=COMPILERS)
    decision = select(there, family, a_problem())
    assert decision.taken().tier == Tier.JIT
    assert variant_of(decision.winner) == SPARE
    assert decision.taken().ms == 0.5


def test_a_pinned_variant_runs_or_nothing_does(a_binary: Make, a_device: Describe) -> None:
    slow, *_, liked = aligned()
    archive = in_memory("sm90", [a_binary(v)[0] for v in CUDA])
    decision = decide(a_device(), [archive], pinned=slow, toolchains=COMPILERS, backend="cuda")
    assert (variant_of(decision.winner), decision.taken().tier) == (slow, Tier.EXACT)
    assert f"{slow} is pinned" in told(decision, str(liked))
    spare = decide(a_device(), [archive], pinned=SPARE, toolchains=COMPILERS, backend="cuda")
    assert (variant_of(spare.winner), spare.taken().tier) == (SPARE, Tier.JIT)
    with pytest.raises(NoKernelError):
        decide(a_device(), [archive], pinned=TRITON[0], backend="cuda").taken()


def test_blocks_that_wait_for_each_other_have_to_fit_the_gpu(
    archive_factory: Factory, a_device: Describe
) -> None:
    """Which a kernel tells by the number of SMs."""
    kernels = tuple(
        changed(
            k,
            exceeds_residency=lambda v, p, count: None if count >= 100 else f"{count} are too few",
        )
        for k in FAMILY.kernels
    )
    family = replace(FAMILY, kernels=kernels)
    archive = archive_factory("sm90", variants=CUDA)
    for count, tier in ((100, Tier.EXACT), (99, Tier.REFERENCE)):
        there = System(a_device(sm_count=count), (archive,))
        decision = select(there, family, a_problem(), "auto", Tier.REFERENCE)
        assert decision.taken().tier is tier
        assert ("99 are too few" in told(decision, KERNEL)) == (count == 99)


def test_what_is_for_other_architectures_is_not_compiled(a_device: Describe) -> None:
    kernels = tuple(
        changed(k, serves=lambda statics, target: target.capability >= (9, 0))
        for k in FAMILY.kernels
    )
    family = replace(FAMILY, kernels=kernels)
    for capability, tier in (((9, 0), Tier.JIT), ((8, 9), Tier.REFERENCE)):
        there = System(a_device(capability), toolchains=COMPILERS)
        decision = select(there, family, a_problem(), "auto", Tier.REFERENCE)
        assert decision.taken().tier is tier
        assert ("it is not for sm_89" in told(decision, KERNEL)) == (tier != Tier.JIT)
