"""Which variants are built for which architectures, and how that is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from changing import changed

from scan_registry.aot import plan as planning
from scan_registry.aot.plan import chosen_archs, plan
from scan_registry.hardware.target import RELEASED, Target
from scan_registry.kernels import families
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel, pinned
from scan_registry.kernels.tuning import Row, Tuning


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCAN_REGISTRY_ARCHS", raising=False)


def labels(settings: Any = None) -> list[str]:
    return [arch.label for arch in chosen_archs(settings)]


def test_the_default() -> None:
    for settings in (None, {}, {"archs": "all"}, {"archs": ""}, {"other": "sm90"}):
        assert labels(settings) == list(RELEASED)


def test_the_default_runs_everywhere_from_sm_80_up() -> None:
    targets = [Target.parse(arch) for arch in RELEASED]
    for device in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)):
        assert any(target.misfit(device) is None for target in targets)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sm90", ["sm90"]),
        ("sm80,sm90", ["sm80", "sm90"]),
        ("sm90 ; compute_80,, sm_80", ["sm90", "ptx80", "sm80"]),
        ("sm90,sm_90,SM90", ["sm90"]),
        ("sm90a", ["sm90a"]),
        (["sm80", "sm90,ptx80"], ["sm80", "sm90", "ptx80"]),
        ("none", []),
    ],
)
def test_a_choice(text: Any, expected: list[str]) -> None:
    assert labels({"archs": text}) == expected


def test_settings_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCAN_REGISTRY_ARCHS", "sm86")
    assert labels() == ["sm86"]
    assert labels({"archs": "sm89"}) == ["sm89"]
    monkeypatch.setenv("SCAN_REGISTRY_ARCHS", "none")
    assert labels() == []


@pytest.mark.parametrize("text", ["hopper", "sm90,gfx90a", "none,sm90"])
def test_what_is_no_architecture(text: str) -> None:
    with pytest.raises(ValueError, match="is not an architecture"):
        chosen_archs({"archs": text})


def test_a_plan_is_every_variant_for_every_arch_in_order() -> None:
    archs = tuple(map(Target.parse, ("sm90", "ptx80")))
    kernels = [kernel for family in families().values() for kernel in family.kernels]
    variants = [v for k in kernels for v in (k.every if k.tunable.timings() else k.variants)]
    jobs = plan(archs)
    assert list(jobs) == list(archs)
    for arch in archs:
        chosen = {job.variant for job in jobs[arch]}
        assert [job.variant for job in jobs[arch]] == [v for v in variants if v in chosen]
        assert all(job.arch == arch for job in jobs[arch])
    assert plan(()) == {}


def spare_labels(kernel: Kernel) -> list[str]:
    """What tunings may name beside the defaults."""
    usual = {kernel.label(variant) for variant in kernel.by_text.values()}
    return [
        fromkey
        for fromkey in dict.fromkeys(map(kernel.label, kernel.every))
        if fromkey not in usual
    ]


def defaults(kernel: Kernel, arch: str) -> set[str]:
    """Labels of the defaults that an architecture's archives have."""
    held = kernel.by_text.values()
    target, rules = Target.parse(arch), kernel.rules
    return {
        kernel.label(variant)
        for variant in held
        if rules.serves(variant.statics, target) and rules.ships(variant.statics, target)
    }


def planned(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, arch: str) -> dict[str, bool]:
    """Labels of the kernel's variants, and whether they are optional."""
    family = replace(FAMILY, kernels=(kernel,))
    monkeypatch.setattr(planning, "families", lambda: {family.name: family})
    (jobs,) = plan([Target.parse(arch)]).values()
    return {kernel.label(job.variant): job.optional for job in jobs}


def tuned(kernel: Kernel, *tunings: Tuning) -> Kernel:
    """A kernel whose wheels have room for everything that was timed."""
    return changed(kernel, tunings=lambda: tunings, timings=lambda: tunings)


def test_what_tunings_name_is_optional_on_other_architectures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = FAMILY.kernels[0]
    spares = spare_labels(kernel)[:3]
    tunings = tuple(
        Tuning.of(arch, "x", "d", {"k": [Row({"time": 1}, {spare: 1.0})]}, exclusive)
        for (arch, exclusive), spare in zip(
            (("sm_80", False), ("sm_90", False), ("sm_90", True)), spares, strict=True
        )
    )
    for arch, expected in (
        ("sm90", {spares[1]: False, spares[2]: False}),
        ("sm86", {spares[0]: True}),
        ("sm120", {spares[1]: True}),
        ("ptx80", {spares[0]: True, spares[1]: True}),
    ):
        usual = dict.fromkeys(defaults(kernel, arch), False)
        assert planned(monkeypatch, tuned(kernel, *tunings), arch) == usual | expected


def test_tuned_variants_take_the_place_of_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, if defaults were timed on more than one problem, those that are near the fastest."""
    kernel = FAMILY.kernels[0]
    kind = pinned(next(iter(kernel.by_text.values())).statics[:3])
    own = {label for label in defaults(kernel, "sm90") if label.startswith(f"{kind},")}
    a, b = [label for label in spare_labels(kernel) if label.startswith(f"{kind},")][:2]
    near, far = 0.9 * planning.BORROWED, 1.1 * planning.BORROWED
    slow = {min(own): 9 * far}
    rows = [
        Row({"time": 1}, {a: 1.0, b: far, **slow}),
        Row({"time": 2}, {a: near, b: 1.0, **slow}),
        Row({"time": 4}, {b: 1.0, a: far}),
    ]
    for served, elsewhere in ((rows[:2], {a}), (rows, {a, b}), (rows[1:], own)):
        tuning = Tuning.of("sm_90", "x", "d", {kind: served})
        for arch, expected in (("sm90", {a, b, *slow}), ("sm89", elsewhere), ("ptx80", elsewhere)):
            actual = set(planned(monkeypatch, tuned(kernel, tuning), arch))
            others = {t for t in defaults(kernel, arch) if not t.startswith(f"{kind},")}
            assert actual == others | expected, (arch, len(served))


def test_archives_have_the_rows_of_what_they_hold() -> None:
    kernel = FAMILY.kernel("channel_last_forward", "cuda")
    for arch in map(Target.parse, ("sm80", "sm90", "ptx80")):
        contents = {kernel.label(job.variant) for job in plan([arch])[arch]}
        for tuning in planning.tunings_for(kernel, arch):
            assert tuning.labels
            assert set(tuning.labels) <= contents


def test_what_there_is_no_room_for_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fastest of the others is, though it is slower where it was measured."""
    kernel = FAMILY.kernels[0]
    kind = pinned(next(iter(kernel.by_text.values())).statics[:3])
    large, small = [label for label in spare_labels(kernel) if label.startswith(f"{kind},")][:2]
    slower = 2 * planning.BORROWED
    usual = next(label for label in defaults(kernel, "sm90") if label.startswith(f"{kind},"))
    times = {large: 1.0, small: slower, usual: 9 * slower}
    rows = [Row({"time": time}, times) for time in (1, 2)]
    tuning = Tuning.of("sm_90", "x", "d", {kind: rows})

    def serves(statics: Any, target: Target) -> bool:
        return pinned(statics) != large or target.capability in ((8, 0), (10, 0))

    for arch, expected in (("sm80", large), ("sm89", small), ("sm100", large), ("sm120", small)):
        actual = planned(monkeypatch, changed(tuned(kernel, tuning), serves=serves), arch)
        assert {label for label in actual if label.startswith(f"{kind},")} == {expected}


def test_architectures_get_no_kernels_that_are_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = changed(FAMILY.kernels[0], serves=lambda statics, target: target.capability >= (9, 0))
    family = replace(FAMILY, kernels=(kernel,))
    monkeypatch.setattr(planning, "families", lambda: {family.name: family})
    for arch, there in (("sm89", False), ("ptx80", False), ("sm90", True), ("sm120", True)):
        (jobs,) = plan([Target.parse(arch)]).values()
        assert bool(jobs) == there


def test_what_does_not_ship_is_compiled_where_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = changed(FAMILY.kernels[0], ships=lambda statics, target: not target.is_ptx)
    dtype = kernel.variants[0].text("dtype")
    for arch, there in (("sm90", True), ("ptx80", False)):
        assert bool(planned(monkeypatch, kernel, arch)) == there
        assert kernel.held(dtype, Target.parse(arch))
