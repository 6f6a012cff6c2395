"""ci/cross.py: what it tells zig and pip, and what it lets through as another machine's code."""

from __future__ import annotations

import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from ci import cross
from ci.matrix import Platform, load
from ci.workspace import DevError
from scan_registry.packaging.wheel import Wheel

ARM = next(platform for platform in load().platforms if platform.name == "aarch64")
LIBRARY = "scan_registry/hardware/_launcher.abi3.so"


def elf(machine: int, *, kind: int = 3, bits: int = 2) -> bytes:
    return struct.pack("<4sBB10xHH", b"\x7fELF", bits, 1, kind, machine) + bytes(44)


def test_every_platform_of_the_matrix_has_a_target() -> None:
    assert [cross.target(platform) for platform in load().platforms] == [
        "x86_64-linux-gnu.2.28",
        "aarch64-linux-gnu.2.28",
    ]
    assert {platform.name for platform in load().platforms} <= set(cross.MACHINES)
    with pytest.raises(DevError, match="manylinux2014 does not state a version of glibc"):
        cross.target(Platform("aarch64", "manylinux2014", "a runner"))


def test_libraries_for_another_machine_are_named() -> None:
    right = {"a.so": elf(183), "a.py": b"", "archives/sm90.scanreg": elf(190)}
    assert cross.foreign(right, "aarch64") == []
    assert cross.foreign(right, "x86_64") == ["a.so"]
    for wrong in (elf(62), elf(183, kind=1), elf(183, bits=1), b"\x7fELF", b""):
        assert cross.foreign({**right, "b.so": wrong}, "aarch64") == ["b.so"]
    assert cross.foreign({"a.py": b""}, "aarch64") == ["no file"]


def test_libraries_load_with_the_largest_pages() -> None:
    def with_parts(*parts: tuple[int, int]) -> bytes:
        head = bytearray(elf(183))
        struct.pack_into("<Q14xHH", head, 32, len(head), 56, len(parts))
        return bytes(head) + b"".join(struct.pack("<I44xQ", *part) for part in parts)

    loaded, stack = 1, 0x6474E551
    files = {
        "right.so": with_parts((loaded, 65536), (stack, 0), (loaded, 65536)),
        "wrong.so": with_parts((loaded, 65536), (loaded, 4096)),
        "data": b"",
    }
    assert cross.crowded(files, "aarch64") == ["wrong.so"]
    assert cross.crowded(files, "x86_64") == []
    assert set(cross.PAGES) == set(cross.MACHINES)


def test_a_wheel_gets_the_platforms_tag(core: Wheel, tmp_path: Path) -> None:
    tag = "cp310-abi3-linux_aarch64"
    stated = core.information["WHEEL"].replace(core.tag.encode(), tag.encode())
    created = replace(core, tag=tag).with_information({"WHEEL": stated})
    right = created.with_files({LIBRARY: elf(183)}).write(tmp_path / "right")
    (tmp_path / "tagged").mkdir()
    (tmp_path / "tagged" / "old.whl").touch()
    path = cross.tagged(right, ARM, tmp_path / "tagged")
    assert [item.name for item in (tmp_path / "tagged").iterdir()] == [path.name]
    assert path.name == "scan_registry-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl"
    tags = re.findall(rb"^Tag: (.*)$", Wheel.read(path).information["WHEEL"], re.MULTILINE)
    assert tags == [b"cp310-abi3-manylinux_2_28_aarch64"]
    wrong = created.with_files({LIBRARY: elf(62)}).write(tmp_path / "wrong")
    with pytest.raises(DevError, match=r"_launcher\.abi3\.so is not machine code for aarch64"):
        cross.tagged(wrong, ARM, tmp_path / "tagged")


def test_the_compiler_is_told_the_target(tmp_path: Path) -> None:
    path = cross.compiler_in(tmp_path, Path("/some where/python"), ARM)
    text = path.read_text(encoding="utf-8")
    assert "'/some where/python' -m ziglang cc -target aarch64-linux-gnu.2.28 \"$@\"" in text
    assert path.stat().st_mode & 0o111


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_headers_are_held_against_the_target(tmp_path: Path) -> None:
    """This machine plays the target."""
    headers = cross.headers_in(tmp_path)
    compiler = Path(shutil.which("cc") or "")
    cross.check_headers(compiler, headers, tmp_path)
    stated = (headers / "pyconfig.h").read_text(encoding="utf-8")
    for right, wrong in (
        (r"#define SIZEOF_WCHAR_T \d+", "#define SIZEOF_WCHAR_T 3"),
        (r"#define ALIGNOF_SIZE_T \d+", "#define ALIGNOF_SIZE_T 3"),
    ):
        changed, count = re.subn(right, wrong, stated)
        assert count == 1
        (headers / "pyconfig.h").write_text(changed, encoding="utf-8")
        with pytest.raises(DevError, match="try Python's headers on the target failed"):
            cross.check_headers(compiler, headers, tmp_path)
