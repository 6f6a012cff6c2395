"""The chunks of an archive: what is compressed together comes apart again, or says what is wrong."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kinds import by_names

from scan_registry.artifact import archive, chunks
from scan_registry.artifact.archive import Archive, ArchiveError, Binary
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY

Make = Callable[..., tuple[Binary, bytes]]

SM90 = Target.parse("sm90")
#: Of one section.
VARIANTS = by_names(v for v in FAMILY.kernels[0].every if ("dtype", "float32") in v.statics)[0][:5]


#: In which the binaries of ``spread`` are read.
ORDERS = ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (1, 0, 4, 2, 3))


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("content", [b"", b"x", b"ab" * 70_000, noise(0, 300_000), bytes(1 << 17)])
def test_round_trip(content: bytes) -> None:
    packed = chunks.compress(content)
    assert chunks.decompress(packed, len(content)) == content
    assert chunks.decompress(packed, len(content) // 2) == content[: len(content) // 2]
    assert chunks.decompress(packed, len(content) + 9) == content
    opened = chunks.Opened(packed)
    last = max(0, len(content) - 2)
    for start, size in ((3, 5), (0, 4), (last, 9), (last, 9), (0, 1 << 30)):
        assert opened.part(start, size) == content[start : start + size]


def test_machine_code_is_compressed_by_its_instructions() -> None:
    drawn = random.Random(0)
    words = b"".join(
        bytes([drawn.randrange(4), 0, 7, drawn.randrange(99)]) * 4 for _ in range(9000)
    )
    code, other = b"\x7fELF" + bytes(12) + words, b"\x7fELG" + bytes(12) + words
    assert len(chunks.compress(code)) < len(chunks.compress(other))
    assert chunks.decompress(chunks.compress(code), len(code)) == code


def test_what_is_alike_is_small_together() -> None:
    code = noise(1, 100_000)
    assert len(chunks.compress(code + code)) < 1.01 * len(chunks.compress(code))


@pytest.mark.parametrize("damaged", [b"\xff" * 100, b"\x02" * 100])
def test_damage(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be decompressed"):
        chunks.decompress(damaged, 100)
    with pytest.raises(ValueError, match="cannot be decompressed"):
        chunks.decompress(chunks.compress(b"x"), 2**63)


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, a_binary: Make
) -> tuple[Path, list[tuple[Binary, bytes]]]:
    """An archive with three binaries in a chunk, one in the next, and one that is larger than a chunk."""
    sizes = [100_000, 300_000, 2 * chunks.SIZE, chunks.SIZE - 100, 10]
    entries = [a_binary(v, content=noise(s, s)) for v, s in zip(VARIANTS, sizes, strict=True)]
    path = tmp_path_factory.mktemp("spread") / "sm90.scanreg"
    archive.write(path, SM90, entries, {"version": "1"})
    return path, entries


@pytest.fixture
def spread(
    tmp_path: Path, written: tuple[Path, list[tuple[Binary, bytes]]]
) -> tuple[Path, list[tuple[Binary, bytes]]]:
    """A copy of that archive, for one test."""
    path, contents = written
    return Path(shutil.copyfile(path, tmp_path / path.name)), contents


@pytest.fixture
def small(tmp_path: Path, a_binary: Make) -> tuple[Path, list[tuple[Binary, bytes]]]:
    """An archive of little binaries, in one chunk."""
    entries = [a_binary(v, content=noise(n, 100)) for n, v in enumerate(VARIANTS)]
    path = tmp_path / "sm90.scanreg"
    archive.write(path, SM90, entries, {"version": "1"})
    return path, entries


def test_those_of_like_size_share_a_chunk_up_to_its_size_as_they_were_given(
    spread: tuple[Path, list[tuple[Binary, bytes]]], archive_parts: Any
) -> None:
    path, contents = spread
    (document,) = archive_parts.of(path.read_bytes()).sections.values()
    assert [own["chunk"] for own in document["binaries"]] == [0, 0, 2, 1, 0]
    assert [own["offset"] for own in document["binaries"]] == [0, 100_000, 0, 0, 400_000]
    opened = Archive(path)
    assert {binary: opened.read(binary) for binary in opened.binaries} == dict(contents)


def test_damage_to_a_chunk_spares_what_lies_before_it_and_in_others(
    spread: tuple[Path, list[tuple[Binary, bytes]]], archive_parts: Any
) -> None:
    path, contents = spread
    parts = archive_parts.of(path.read_bytes())
    (document,) = parts.sections.values()
    inside = document["chunks"][0][0] + 200_000
    parts.code = parts.code[:inside] + b"\xff" * 50 + parts.code[inside + 50 :]
    path.write_bytes(parts.together())
    opened = Archive(path)
    for order in ORDERS:
        for read in (opened.read, opened.reader()):
            for number in order:
                binary, content = contents[number]
                if number == 1:
                    with pytest.raises(ArchiveError, match=str(binary.variant)):
                        read(binary)
                else:
                    assert read(binary) == content


def test_a_reader_decompresses_no_chunk_twice(
    spread: tuple[Path, list[tuple[Binary, bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, contents = spread
    opened, first_one = [], chunks.Opened
    monkeypatch.setattr(chunks, "Opened", lambda chunk: opened.append(chunk) or first_one(chunk))
    for order in ORDERS:
        opened.clear()
        read = Archive(path).reader()
        for number in (*order, *order):
            binary, content = contents[number]
            assert read(binary) == content
        assert len(opened) == len(set(opened)) == 3


@pytest.mark.parametrize("listed", [None, {}, 1, [1], [{}], [[0]], [[0, "1"]], [[0, 1]]])
def test_chunks_that_are_none(
    small: tuple[Path, list[tuple[Binary, bytes]]], archive_parts: Any, listed: object
) -> None:
    path, contents = small
    parts = archive_parts.of(path.read_bytes())
    (document,) = parts.sections.values()
    document["chunks"] = listed
    path.write_bytes(parts.together())
    with pytest.raises(ArchiveError, match=r"sm90\.scanreg"):
        Archive(path).read(contents[0][0])


def test_a_python_without_lzma(
    small: tuple[Path, list[tuple[Binary, bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, contents = small
    monkeypatch.setattr(chunks, "lzma", None)
    with pytest.raises(ArchiveError, match="needs the module lzma"):
        Archive(path).read(contents[0][0])
    with pytest.raises(OSError, match="needs the module lzma"):
        archive.write(path, SM90, contents, {"version": "1"})
