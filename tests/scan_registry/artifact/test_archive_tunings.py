"""What archives hold of tuning, and where it puts their binaries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kinds import by_names

from scan_registry.artifact import archive, chunks
from scan_registry.artifact.archive import Archive, ArchiveError, Binary
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.tuning import Row, Tuning

Make = Callable[..., tuple[Binary, bytes]]

SM90 = Target.parse("sm90")
ORIGIN = {"version": "9.9.9"}
KINDS = by_names(
    v for v in FAMILY.kernels[0].variants if FAMILY.kernels[0].rules.serves(v.statics, SM90)
)


def test_tunings_go_by_their_kernel(tmp_path: Path, a_binary: Make) -> None:
    variants = [FAMILY.kernels[0].variants[0], FAMILY.kernels[1].variants[0]]
    tunings = (
        Tuning.of("sm_90", "x", "d", {"k": [Row({"time": 8}, {"a": 1.0})]}),
        Tuning.of("sm_80", "y", "d", {}),
    )
    entries = [a_binary(variant) for variant in variants]
    path, target = tmp_path / "sm90.scanreg", Target.parse("sm90")
    inputs = {variants[0].head: tunings, "a.kernel:cuda": tunings}
    archive.write(path, target, entries, ORIGIN, inputs)
    result = Archive(path)
    assert result.tunings(variants[0].head) == tunings
    assert result.tunings(variants[1].head) == ()
    assert result.tunings("a.kernel:cuda") == ()
    assert result.binaries == tuple(binary for binary, _ in entries)
    without = tmp_path / "other" / "sm90.scanreg"
    archive.write(without, target, entries, ORIGIN)
    archive.write(path, target, entries, ORIGIN, {"a.kernel:cuda": tunings})
    assert path.read_bytes() == without.read_bytes()


def test_what_is_fastest_most_often_is_read_first(tmp_path: Path, a_binary: Make) -> None:
    kernel, size = FAMILY.kernels[0], 1000
    variants = [v for v in kernel.variants if kernel.rules.serves(v.statics, SM90)][:4]
    entries = [a_binary(v, content=bytes([i]) * size) for i, v in enumerate(variants)]
    labels = [kernel.label(binary.variant) for binary, _ in entries]
    rows = [
        Row({"time": time}, {labels[fastest]: 1.0, labels[0]: 2.0})
        for time, fastest in enumerate((2, 3, 3, 1, 3, 2), 1)
    ]
    tunings = tuple(Tuning.of("sm_90", "x", "d", {"k": half}) for half in (rows[:2], rows[2:]))
    path = tmp_path / "sm90.scanreg"
    archive.write(path, Target.parse("sm90"), entries, ORIGIN, {kernel.head: tunings})
    result = Archive(path)
    assert result.binaries == tuple(binary for binary, _ in entries)
    assert [result.read(binary) for binary, _ in entries] == [content for _, content in entries]
    places = [entry.place for entry in result.of("linear_scan", kernel.name)]
    # What is the fastest nowhere is in a chunk of its own.
    assert places == [(1, 0), (0, 2 * size), (0, size), (0, 0)]


def test_binaries_with_the_same_static_parameters_are_together(
    tmp_path: Path, a_binary: Make
) -> None:
    (a, b, *_), (other, another, *_), *_ = KINDS
    variants = [a, other, b, another]
    binaries = [
        a_binary(v, content=bytes([i]) * (chunks.SIZE // 2)) for i, v in enumerate(variants)
    ]
    path = tmp_path / "sm90.scanreg"
    archive.write(path, SM90, binaries, ORIGIN)
    entries = Archive(path).of("linear_scan", FAMILY.kernels[0].name)
    first, second, third, fourth = (entry.place[0] for entry in entries)
    assert first == third != second == fourth
    assert [Archive(path).read(binary) for binary, _ in binaries] == [
        content for _, content in binaries
    ]


def test_what_is_fastest_on_this_architecture_is_in_small_chunks(
    tmp_path: Path, a_binary: Make
) -> None:
    kernel, half = FAMILY.kernels[0], chunks.SMALL // 2
    binaries = [a_binary(v, content=bytes([i]) * half) for i, v in enumerate(KINDS[0][:6])]
    rows = [
        Row({"time": time}, {kernel.label(binary.variant): 1.0})
        for time, (binary, _) in enumerate(binaries[:4], 1)
    ]
    for arch, expected in (("sm_90", [0, 0, 1, 1, 2, 2]), ("sm_80", [0] * 6)):
        path, tuning = tmp_path / "sm90.scanreg", Tuning.of(arch, "x", "d", {"k": rows})
        archive.write(path, SM90, binaries, ORIGIN, {kernel.head: [tuning]})
        actual = Archive(path)
        entries = actual.of("linear_scan", kernel.name)
        assert [entry.place[0] for entry in entries] == expected
        assert [actual.read(binary) for binary, _ in binaries] == [
            content for _, content in binaries
        ]


@pytest.mark.parametrize("tunings", [3, "x", [3], [{}], {"arch": 1}])
def test_tunings_that_are_none(
    tmp_path: Path, a_binary: Make, archive_parts: Any, tunings: Any
) -> None:
    path, contents = tmp_path / "sm90.scanreg", a_binary()
    archive.write(path, Target.parse("sm90"), [contents], ORIGIN)
    parts = archive_parts.of(path.read_bytes())
    head = contents[0].variant.head
    parts.tunings[head] = tunings
    path.write_bytes(parts.together())
    with pytest.raises(ArchiveError, match=r"sm90\.scanreg: the tunings of linear_scan\."):
        Archive(path).tunings(head)
    parts.manifest["tunings"] = tunings
    path.write_bytes(parts.sealed(json.dumps(parts.manifest).encode(), b""))
    with pytest.raises(ArchiveError, match=r"sm90\.scanreg: the manifest"):
        Archive(path).tunings(head)
