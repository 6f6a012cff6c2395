"""Archives: what is written is read back, and no damage goes unnoticed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scan_registry.artifact import archive, chunks
from scan_registry.artifact.archive import Archive, ArchiveError, Binary, digest
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]

SM90 = Target.parse("sm90")
VARIANTS = FAMILY.variants()


@pytest.fixture
def two(archive_factory: Factory) -> Path:
    """An archive with two binaries of one section."""
    return archive_factory("sm90", variants=VARIANTS[:2]).path


def read_all(path: Path) -> dict[Binary, bytes]:
    opened = Archive(path)
    return {binary: opened.read(binary) for binary in opened.binaries}


def refused(path: Path, *words: str) -> None:
    """Reading the file raises ``ArchiveError`` with its name and ``words`` in the message."""
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_round_trip(archive_factory: Factory, a_binary: Make) -> None:
    given_ = [
        a_binary(VARIANTS[0], "sm90", b"first"),
        a_binary(VARIANTS[1], "sm90a", b"second", dynamic_shared=65_536, cluster=(2, 1, 1)),
        a_binary(VARIANTS[2], "sm90", b"third", registers=None, options=("-a", "-b c")),
    ]
    written = archive_factory("sm90", given_)
    assert written.binaries == tuple(binary for binary, _ in given_)
    assert read_all(written.path) == dict(given_)
    assert written.manifest["version"] == "9.9.9"
    assert written.manifest["arch"] == "sm_90"
    assert written.arch == SM90
    assert stat.S_IMODE(written.path.stat().st_mode) == 0o644


def test_equal_bytes_are_stored_once(
    archive_factory: Factory, a_binary: Make, archive_parts: Any
) -> None:
    content = bytes(range(256)) * 16
    written = archive_factory("sm90", [a_binary(v, content=content) for v in VARIANTS[:5]])
    assert archive_parts.of(written.path.read_bytes()).code == chunks.compress(content)
    assert set(read_all(written.path).values()) == {content}


def test_construction_reads_nothing(tmp_path: Path) -> None:
    unread = Archive(tmp_path / "sm90.scanreg")
    assert unread.arch == SM90
    refused(unread.path, "No such file")


def test_a_write_with_other_bytes_than_stated_is_refused(tmp_path: Path, a_binary: Make) -> None:
    binary, _ = a_binary()
    with pytest.raises(ValueError, match="do not have the digest"):
        archive.write(tmp_path / "sm90.scanreg", SM90, [(binary, b"other")], {})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    two: Path, a_binary: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = two.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        archive.write(two, SM90, [a_binary()], {})
    assert two.read_bytes() == before
    assert list(two.parent.iterdir()) == [two]


def test_a_cut_is_noticed_wherever_it_is(
    archive_factory: Factory, a_binary: Make, archive_parts: Any
) -> None:
    path = archive_factory("sm90", [a_binary(v) for v in VARIANTS[:2]]).path
    whole = path.read_bytes()
    manifest_end = archive_parts.HEADER.size + archive_parts.HEADER.unpack_from(whole)[1]
    for length in (0, 7, 8, 15, 47, 48, 49, manifest_end - 1):
        path.write_bytes(whole[:length])
        refused(path)
    for length in (manifest_end, manifest_end + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, "the section linear_scan.", "manifest states")


def test_a_section_is_read_when_it_is_needed(archive_factory: Factory) -> None:
    """Damage to one does not keep the others from being used."""
    kernels = FAMILY.kernels[:2]
    path = archive_factory("sm90", variants=[k.variants[0] for k in kernels]).path
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    opened = Archive(path)
    (entry,) = opened.of("linear_scan", kernels[0].name)
    assert opened.read(entry.binary)
    damaged = f"the section linear_scan.{kernels[1].name}:cuda:dtype=float32 has"
    with pytest.raises(ArchiveError, match=damaged):
        opened.of("linear_scan", kernels[1].name)


def test_a_dtype_is_read_when_it_is_needed(archive_factory: Factory) -> None:
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    wanted = [v for v in kernel.variants if v.text("dtype") in ("float32", "bfloat16")]
    path = archive_factory("sm90", variants=wanted).path
    whole = Archive(path)
    for dtype in ("float32", "bfloat16"):
        expected = tuple(str(v) for v in wanted if v.text("dtype") == dtype)
        actual = whole.of("linear_scan", kernel.name, "cuda", dtype)
        assert tuple(entry.text for entry in actual) == expected
    assert whole.of("linear_scan", kernel.name, "triton", "float32") == ()
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    opened = Archive(path)
    assert opened.of("linear_scan", kernel.name, "cuda", "float32")
    with pytest.raises(ArchiveError, match="dtype=bfloat16 has SHA-256"):
        opened.of("linear_scan", kernel.name, "cuda", "bfloat16")


def test_an_edited_manifest_shows_both_digests(two: Path, archive_parts: Any) -> None:
    content = bytearray(two.read_bytes())
    stated = content[16:48].hex()
    content[content.index(b"c0ffee")] ^= 1
    two.write_bytes(content)
    start, length = archive_parts.HEADER.size, archive_parts.HEADER.unpack_from(content)[1]
    refused(two, stated, digest(bytes(content[start:][:length])))


def test_an_edited_binary_shows_both_digests_and_its_name(
    archive_factory: Factory, a_binary: Make
) -> None:
    good, (binary, code) = a_binary(VARIANTS[1], content=b"good"), a_binary(content=b"machine code")
    path = archive_factory("sm90", [(binary, code), good]).path
    path.write_bytes(path.read_bytes().replace(code, b"machine c0de"))
    opened = Archive(path)
    assert opened.read(good[0]) == b"good"
    with pytest.raises(ArchiveError) as caught:
        opened.read(binary)
    for word in (str(path), str(binary.variant), "sm_90", binary.sha256, digest(b"machine c0de")):
        assert word in str(caught.value)


def test_wrong_magic(two: Path) -> None:
    two.write_bytes(b"SCANREG\x01" + two.read_bytes()[8:])
    refused(two, r"SCANREG\x01", r"SCANREG\x05")


def test_wrong_name(two: Path) -> None:
    renamed = two.rename(two.with_name("sm80.scanreg"))
    refused(renamed, "holds", "sm_90", "sm_80")
    refused(renamed.rename(two.with_name("backup.scanreg")), "not an architecture's")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file(archive_factory: Factory) -> None:
    path = archive_factory("sm90").path
    path.chmod(0)
    refused(path, "Permission denied")


#: What is no JSON, or not of the right form.
TEXTS = (b"", b"[]", b"7", b"\xff\xfe", b"[" * 200_000, b"{}")
SECTION = f"the section linear_scan.{VARIANTS[0].kernel}:cuda"


@pytest.mark.parametrize("text", TEXTS)
def test_a_manifest_that_is_none(tmp_path: Path, archive_parts: Any, text: bytes) -> None:
    (tmp_path / "sm90.scanreg").write_bytes(archive_parts.sealed(text, b""))
    refused(tmp_path / "sm90.scanreg", "manifest")


@pytest.mark.parametrize("schema", [1, "3", None])
def test_wrong_schema(two: Path, archive_parts: Any, schema: object) -> None:
    parts = archive_parts.of(two.read_bytes())
    parts.manifest["schema"] = schema
    two.write_bytes(parts.together())
    refused(two, f"schema {schema!r}; this version reads {archive.SCHEMA}")


@pytest.mark.parametrize(
    "sections",
    [
        *(None, {}, "x", [1]),
        *([f"a.b:cuda: {wrong}"] for wrong in ("", "0 1", "a b c", "0 1 ab c", "-1 1 ab")),
        *([f"a.b:cuda: 0 {wrong} ab"] for wrong in ("-1", "1.5", 2**40, 2**62, "9" * 5000)),
        *(["a.b:cuda: ٠ 1 ab"], ["a.b:cuda 0 1 ab"], ["a.b:cuda: 0 1 ab"]),
    ],
)
def test_sections_that_are_none(two: Path, archive_parts: Any, sections: object) -> None:
    manifest = {**archive_parts.of(two.read_bytes()).manifest, "sections": sections}
    two.write_bytes(archive_parts.sealed(json.dumps(manifest).encode(), b"rest"))
    refused(two, "section")


def sealed_section(path: Path, parts: Any, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Write the archive with changed lines of its section, of which the first is the head."""
    (document,) = parts.of(path.read_bytes()).sections.values()
    text = b"\n".join(change(parts.lines(document)))
    path.write_bytes(parts.of(path.read_bytes()).together(**{VARIANTS[0].kernel: text}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((lambda _, text=text: [text], SECTION) for text in TEXTS),
        (lambda lines: lines[:-1], "lists 2 binaries and has 1 entries"),
        (lambda lines: [*lines, b"{}"], "lists 2 binaries and has 3 entries"),
        *(
            (lambda lines, text=text: [*lines[:2], text], f"binary 1 of {SECTION}")
            for text in (b"", b"null", b"\xff\xfe", b"[" * 200_000)
        ),
        *(
            (lambda lines, text=text: [*lines[:2], lines[2][:-1] + text], "binary 1 of the section")
            for text in (b', "variant": "x"}', b', "target": "sm_90"}')
        ),
    ],
)
def test_lines_that_are_wrong(
    two: Path, archive_parts: Any, change: Callable[[list[bytes]], list[bytes]], words: str
) -> None:
    sealed_section(two, archive_parts, change)
    refused(two, words)
    if words == f"binary 1 of {SECTION}":  # what is wrong is that line alone
        entries = Archive(two).of("linear_scan", VARIANTS[0].kernel)
        assert entries[0].binary.variant == VARIANTS[0]


WRONG: dict[str, tuple[Any, ...]] = {
    "variant": (None, 1, "", "linear_scan.x:cuda:dtype", "a.b:hip:c=1"),
    "target": (None, 90, "sm", "gfx90a"),
    "format": (None, 1, [], {}),
    "format_version": (None, 7, [8, 8]),
    "oldest_driver": (None, "12.9", [12], [12, 9, 0], [-12, 9], [12, True]),
    "entry": (None, 1, []),
    "block": (None, 128, [128, 1], [128, 1, 0], [128, 1, "1"], [1, 1, 1, 1]),
    "cluster": (None, 1, [1, 1], [1.5, 1, 1]),
    "dynamic_shared": (None, "0", 1.5, []),
    "hidden": (None, "0", 1.5),
    "registers": ("40", 1.5, []),
    "static_shared": ("0", []),
    "spill_bytes": ("0", {}),
    "size": (None, "1", 1.5, 3, -1, 2**70),
    "sha256": (None, 1, []),
    "compiler": (None, 1),
    "options": (None, "-O3", 1, {}),
    "source_sha256": (None, 1),
    "chunk": (None, "0", 1.5, -1, 1, 2**62),
    "offset": (None, "0", 1.5, -1, 1, 2**70),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_wrong_value_in_an_entry(two: Path, archive_parts: Any, key: str, value: object) -> None:
    """Numbers of the right type that lead elsewhere give other bytes, and so another digest."""
    parts = archive_parts.of(two.read_bytes())
    (section,) = parts.sections.values()
    section["binaries"][1][key] = value
    two.write_bytes(parts.together())
    refused(two, "" if isinstance(value, int) and key in ("chunk", "offset", "size") else SECTION)


@pytest.mark.parametrize(
    "key", [key for key in WRONG if key not in ("registers", "static_shared", "spill_bytes")]
)
def test_every_field_of_an_entry_is_required(two: Path, archive_parts: Any, key: str) -> None:
    parts = archive_parts.of(two.read_bytes())
    (document,) = parts.sections.values()
    assert {*document["common"], *document["binaries"][0]} == set(WRONG)
    for holder in (document["common"], *document["binaries"]):
        holder.pop(key, None)
    two.write_bytes(parts.together())
    refused(two, f"binary 0 of {SECTION}")


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        ("linear_scan.another:cuda", {}),
        ("linear_scan.x:cuda:warps=01", {"variant": "linear_scan.x:cuda:warps=01"}),
        ("linear_scan.x:cuda", {"variant": "linear_scan.x:cuda:warps=1"}),
        ("linear_scan.x:cuda:warps=1", {"variant": "linear_scan.x:cuda:warps=16"}),
        ("linear_scan.x:cuda:warps=1,steps=2", {"variant": "linear_scan.x:cuda:warps=1,steps=2"}),
        (None, {"binaries": None}),
        (None, {"binaries": {}}),
        (None, {"binaries": [1]}),
        (None, {"common": None}),
        (None, {"common": []}),
    ],
)
def test_sections_of_another_kernel_or_form(
    two: Path, archive_parts: Any, of: str | None, changes: dict[str, Any]
) -> None:
    parts = archive_parts.of(two.read_bytes())
    ((name, document),) = parts.sections.items()
    if "variant" in changes:
        document["binaries"] = [{**document["binaries"][0], **changes}]
    else:
        document |= changes
    parts.sections = {of or name: document}
    two.write_bytes(parts.together())
    refused(two, f"binary 0 of the section {of}" if of else "")


def test_what_entries_have_in_common_is_said_once(
    archive_factory: Factory, archive_parts: Any, a_binary: Make
) -> None:
    one, two = a_binary(VARIANTS[0]), a_binary(VARIANTS[1], registers=7)
    path = archive_factory("sm90", [one, two]).path
    (document,) = archive_parts.of(path.read_bytes()).sections.values()
    assert "compiler" in document["common"]
    assert all("compiler" not in own for own in document["binaries"])
    assert [own["registers"] for own in document["binaries"]] == [40, 7]
    assert Archive(path).binaries == (one[0], two[0])


def test_binaries_round_trip_through_json(a_binary: Make) -> None:
    for target in ("sm90", "sm90a", "ptx80"):
        binary, _ = a_binary(target=target)
        assert Binary.from_json(json.loads(json.dumps(binary.to_json()))) == binary
