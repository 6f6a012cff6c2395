"""Targets: spelling, order, and which devices they fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scan_registry.hardware.target import Target

TARGETS = st.builds(
    Target,
    st.tuples(st.integers(1, 12), st.integers(0, 9)),
    st.sampled_from(["sm", "compute"]),
    st.sampled_from(["", "a", "f"]),
)


@pytest.mark.parametrize(
    ("text", "printed", "label", "capability"),
    [
        ("sm80", "sm_80", "sm80", (8, 0)),
        ("sm_86", "sm_86", "sm86", (8, 6)),
        (" SM_90a ", "sm_90a", "sm90a", (9, 0)),
        ("sm100", "sm_100", "sm100", (10, 0)),
        ("sm_121", "sm_121", "sm121", (12, 1)),
        ("ptx80", "compute_80", "ptx80", (8, 0)),
        ("compute_80", "compute_80", "ptx80", (8, 0)),
    ],
)
def test_spellings(text: str, printed: str, label: str, capability: tuple[int, int]) -> None:
    target = Target.parse(text)
    assert (str(target), target.label, target.capability) == (printed, label, capability)
    assert target.is_ptx == printed.startswith("compute")


@pytest.mark.parametrize("text", ["", "90", "sm", "sm9", "sm_1000", "sm-90", "gfx90a", "sm90b"])
def test_what_is_no_target_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ValueError, match="is not an architecture; expected one like sm90"
    ) as caught:
        Target.parse(text)
    assert repr(text) in str(caught.value)


@given(TARGETS)
def test_print_and_label_parse_back(target: Target) -> None:
    assert Target.parse(str(target)) == target
    assert Target.parse(target.label) == target


@pytest.mark.parametrize(
    ("target", "device", "reason"),
    [
        ("sm80", (8, 0), None),
        ("sm80", (8, 6), None),
        ("sm80", (8, 7), "sm_80 and the device's 8.7 are on different sides of Tegra"),
        ("sm87", (8, 7), None),
        ("sm87", (8, 9), "sm_87 and the device's 8.9 are on different sides of Tegra"),
        ("sm86", (8, 0), "sm_86 runs on 8.6 and later 8.x; the device is 8.0"),
        ("sm80", (9, 0), "sm_80 runs on 8.0 and later 8.x; the device is 9.0"),
        ("sm90a", (9, 0), None),
        ("sm90a", (10, 0), "sm_90a runs on 9.0 only; the device is 10.0"),
        ("sm120", (12, 1), None),
        ("ptx80", (8, 0), None),
        ("ptx80", (12, 1), None),
        ("ptx80", (7, 5), "compute_80 needs 8.0 or later, not 7.5"),
    ],
)
def test_misfit(target: str, device: tuple[int, int], reason: str | None) -> None:
    assert Target.parse(target).misfit(device) == reason


@given(TARGETS, st.tuples(st.integers(1, 12), st.integers(0, 9)))
def test_every_target_fits_its_own_capability_and_no_earlier_one(
    target: Target, device: tuple[int, int]
) -> None:
    assert target.misfit(target.capability) is None
    if device < target.capability:
        assert target.misfit(device) is not None
