"""Archives that are damaged at random: what can be read of them is right, and the rest is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive, ArchiveError, Binary, digest
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY

Make = Callable[..., tuple[Binary, bytes]]

SM90 = Target.parse("sm90")
VARIANTS = FAMILY.variants()


@pytest.fixture(scope="module")
def intact(a_binary: Make) -> tuple[bytes, dict[str, bytes]]:
    """An archive's bytes, and what it holds by variant."""
    entries = [
        a_binary(variant, content=bytes([i]) * (i * 7)) for i, variant in enumerate(VARIANTS[:4])
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sm90.scanreg"
        archive.write(path, SM90, entries, {"version": "1"})
        content = path.read_bytes()
    return content, {str(binary.variant): code for binary, code in entries}


def survives(path: Path, contents: dict[str, bytes]) -> None:
    """What can be read of the file is right, and the rest raises ``ArchiveError`` with its name."""
    damaged = Archive(path)
    refusals = []
    try:
        binaries = damaged.binaries
    except ArchiveError as error:
        binaries = ()
        refusals.append(str(error))
    for binary in binaries:
        try:
            content = damaged.read(binary)
        except ArchiveError as error:
            refusals.append(str(error))
        else:
            assert digest(content) == binary.sha256
            assert content in contents.values()
    assert all(str(path) in refusal for refusal in refusals)


@given(data=st.data())
def test_random_damage_is_noticed(
    intact: tuple[bytes, dict[str, bytes]], data: st.DataObject
) -> None:
    content, contents = bytearray(intact[0]), intact[1]
    positions = st.integers(0, len(content) - 1)
    flips = data.draw(st.lists(st.tuples(positions, st.integers(1, 255)), max_size=3))
    for position, bits in flips:
        content[position] ^= bits
    cut = data.draw(st.none() | positions)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sm90.scanreg"
        path.write_bytes(content[:cut])
        survives(path, contents)
        if content[:cut] == intact[0]:
            assert len(Archive(path).binaries) == len(contents)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(data=st.data(), value=JSON)
def test_any_value_in_an_entry_of_the_right_digest(
    intact: tuple[bytes, dict[str, bytes]], archive_parts: Any, data: st.DataObject, value: object
) -> None:
    """A writer with a defect is no reason for another kind of error, or for wrong bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sm90.scanreg"
        parts = archive_parts.of(intact[0])
        section = next(iter(parts.sections.values()))
        fields = {*section["common"], *section["binaries"][1]}
        section["binaries"][1][data.draw(st.sampled_from(sorted(fields)))] = value
        path.write_bytes(parts.together())
        survives(path, intact[1])
