"""The gates of a release: each lets through what is right, and names what is not."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attesting import write_attestations

from ci import cross, disassembly, gates, products, sbom
from ci.gates import Release
from ci.matrix import load
from ci.products import Parts
from scan_registry.aot.compile import compile_variant
from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.ops import _cpu
from scan_registry.packaging.wheel import Wheel

SM90 = Target.parse("sm90")
LAUNCHER = "scan_registry/hardware/_launcher.abi3.so"
CUDA = FAMILY.kernel("time_last_reduction", "cuda").variants[0]


@pytest.fixture(scope="module")
def written(small: Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small packages; their binaries are made up."""
    dist = tmp_path_factory.mktemp("written") / "dist"
    products.write(small, load(), dist)
    return dist


@pytest.fixture
def release(written: Path, tmp_path: Path) -> Release:
    """A copy of them, for one test."""
    dist = Path(shutil.copytree(written, tmp_path / "dist"))
    place = tmp_path / "unpacked"
    place.mkdir()
    return gates.opened(dist, place, load())


@pytest.fixture
def real(tmp_path: Path) -> Callable[..., Release]:
    """A release of one real binary, in an archive; keywords change what is stated of it."""

    def make(variant: Variant = CUDA, **changes: Any) -> Release:
        binary, content = compile_variant(variant, SM90)
        path = tmp_path / f"{replace(binary, **changes).target.label}{archive.SUFFIX}"
        stated = replace(binary, **changes)
        archive.write(path, stated.target, [(stated, content)], {"version": "0.1.0"})
        return Release(tmp_path, (Archive(path),), load())

    return make


def elf(machine: int) -> bytes:
    """As much of a shared library as is looked at."""
    return struct.pack("<4sBB10xHH", b"\x7fELF", 2, 1, 3, machine) + bytes(44)


def changed(path: Path, change: Callable[[Wheel], Wheel]) -> None:
    change(Wheel.read(path)).write(path.parent)


# --- The binaries -----------------------------------------------------------------------------


def test_intact(real: Callable[..., Release]) -> None:
    assert gates.intact(real()).wrong == ()


def test_machine_code_of_another_architecture(real: Callable[..., Release]) -> None:
    (*_, reason) = gates.intact(real(target=Target.parse("sm80"), options=())).wrong
    assert "architecture: the entry states 80, the image 90" in reason


def test_spilled_registers(packed: Callable[..., bytes], tmp_path: Path) -> None:
    def spilling(size: int) -> tuple[str, ...]:
        path = tmp_path / "sm90.scanreg"
        path.write_bytes(packed("sm90", spill_bytes=size))
        return gates.unspilled(Release(tmp_path, (Archive(path),), load())).wrong

    assert spilling(0) == ()
    assert len(spilling(8)) == 2
    assert "spills 8 bytes" in spilling(8)[0]


def test_attested(release: Release, tmp_path: Path) -> None:
    needed = [
        binary
        for archive in release.archives
        if archive.arch.label in ("sm90", "ptx80")
        for binary in archive.binaries
    ]
    none = gates.attested(release, tmp_path)
    assert len(none.wrong) == len(needed) == 4
    assert none.wrong[0].endswith("no attestation")
    write_attestations(tmp_path, "a-gpu", *needed, error=1e-3)
    assert all(text.endswith("failed") for text in gates.attested(release, tmp_path).wrong)
    write_attestations(tmp_path, "a-gpu", *needed[1:], error=1e-7)
    assert len(gates.attested(release, tmp_path).wrong) == 1
    write_attestations(tmp_path, "a-gpu", *needed, error=1e-7)
    assert gates.attested(release, tmp_path).wrong == ()


def test_copies(real: Callable[..., Release], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FAMILY.kernel("channel_last_forward", "cuda")
    kept = next(v for v in kernel.variants if "lanes_across" in dict(v.statics))
    passed = gates.copied(real(variant=kept))
    assert passed.wrong == ()
    assert int(passed.looked_at.split()[0]) > 0
    of_hint = "/*0f40*/ @P4 LDGSTS.E.BYPASS.LTC128B.128 [R2+UR4], desc[UR5][R22.64] ;"
    monkeypatch.setattr(disassembly, "cuobjdump", lambda *_: f"MOV R1, R2 ;\n{of_hint}\n")
    (wrong,) = gates.copied(real(variant=kept)).wrong
    assert str(kept) in wrong
    assert "desc[UR5]" in wrong


def test_an_architecture_without_copies(real: Callable[..., Release]) -> None:
    (wrong,) = gates.copied(real()).wrong
    assert wrong == "sm90: no asynchronous copies were found"


def test_rebuilt(real: Callable[..., Release]) -> None:
    good = gates.rebuilt(real(), 1)
    assert (good.looked_at, good.wrong) == ("1 of 1 binaries", ())
    (reason,) = gates.rebuilt(real(registers=3), 1).wrong
    assert "registers is" in reason
    (reason,) = gates.rebuilt(real(compiler="nvrtc 1.0"), 1).wrong
    assert "not comparable" in reason


def test_two_builds(release: Release, small: Parts, tmp_path: Path) -> None:
    again = tmp_path / "again"
    products.write(small, load(), again)
    assert gates.identical(release, again).wrong == ()
    (first, second, *_) = sorted(path for path in again.rglob("*") if path.is_file())
    first.unlink()
    second.write_bytes(second.read_bytes() + b"\0")
    wrong = gates.identical(release, again).wrong
    assert f"{first.relative_to(again)}: in one build only" in wrong
    assert f"{second.relative_to(again)}: differs" in wrong


# --- The packages -----------------------------------------------------------------------------


def test_budgets(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    assert gates.budgets(release).wrong == ()
    first, *others = release.matrix.archs
    assert f"of {first.budget:,} bytes, new" in capsys.readouterr().out
    tight = replace(release.matrix, archs=(replace(first, budget=100), *others))
    (text,) = gates.budgets(replace(release, matrix=tight)).wrong
    assert text.startswith("sm80: ")
    assert text.endswith("its budget is 100")
    tight = replace(release.matrix, wheel_budget=1000)
    assert len(gates.budgets(replace(release, matrix=tight)).wrong) == 8


def test_the_change_against_the_last_release(
    release: Release,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = gates.sizes(release)
    last = tmp_path / "sizes.json"
    last.write_text(json.dumps({**sizes, "sm80": sizes["sm80"] - 1500}), encoding="utf-8")
    monkeypatch.setattr(gates, "SIZES", last)
    assert gates.budgets(release).wrong == ()
    out = capsys.readouterr().out
    assert "bytes, +1,500 since the last release" in out
    assert "bytes, +0 since the last release" in out
    assert "new" not in out
    assert not any("0.1.0" in name for name in sizes)


def test_complete(release: Release) -> None:
    assert gates.complete(release).wrong == ()
    (path,) = (release.dist / "pypi").glob("scan_registry_sm80-*.whl")

    def poorer(wheel: Wheel) -> Wheel:
        kept = {
            n: c for n, c in wheel.information.items() if n not in ("licenses/LICENSE", sbom.PATH)
        }
        return replace(wheel, information=kept)

    changed(path, poorer)
    changed(path, lambda wheel: wheel.with_files({"another/__init__.py": b""}))
    assert gates.complete(release).wrong == (
        f"{path.name} installs another, scan_registry_sm80",
        f"{path.name} has no licenses/LICENSE",
        f"{path.name} has no {sbom.PATH}",
    )


def test_metadata(release: Release) -> None:
    for path in (*release.wheels("index"), *release.wheels("pypi")):
        if "sm80" not in path.name:
            path.unlink()  # one is enough
    assert gates.metadata(release).wrong == ()
    (path,) = (release.dist / "pypi").glob("*.whl")
    changed(path, lambda wheel: wheel.with_files({"scan_registry_sm80/x.pyc": b""}))
    (text,) = gates.metadata(release).wrong
    assert text.startswith(f"check-wheel-contents {path.name}: ")
    assert "W001" in text


@pytest.mark.slow
def test_a_wheel_for_any_linux(release: Release) -> None:
    one, *others = [path for path in release.wheels("index", "pypi") if "-abi3-" in path.name]
    one.rename(one.with_name(one.name.replace("manylinux_2_28", "linux")))
    for path in others:
        path.unlink()
    for compiled_here in (True, False):
        wrong = gates.portable(release, compiled_here).wrong
        assert sum("is not for manylinux_2_28_" in text for text in wrong) == 1
        missing = [text for text in wrong if text.startswith("there is no wheel for ")]
        assert len(missing) == (0 if compiled_here else 2)


def tool(shown: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """auditwheel shows this tag; abi3audit is content."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        said = f'x.whl is consistent with\nthe following platform tag: "{shown}".\n'
        return subprocess.CompletedProcess(command, 0, said, "")

    return run


@pytest.mark.parametrize(
    ("shown", "crowded", "words"),
    [
        ("manylinux_2_17_x86_64", [], None),
        ("manylinux_2_34_x86_64", [], "manylinux_2_34"),
        ("manylinux_2_17_aarch64", [], "manylinux_2_17_aarch64"),
        ("manylinux_2_17_x86_64", [LAUNCHER], "does not load where pages have 4096 bytes"),
        (None, [], f"{LAUNCHER} is not machine code for aarch64"),
    ],
)
def test_what_a_tag_promises(
    release: Release,
    monkeypatch: pytest.MonkeyPatch,
    shown: str | None,
    crowded: list[str],
    words: str | None,
) -> None:
    """In the last case x86-64's code is in a wheel for aarch64."""
    for path in (*release.wheels("index"), *release.wheels("pypi")):
        if "-abi3-" in path.name:
            wheel = Wheel.read(path).with_files({LAUNCHER: elf(62)})
            tag = wheel.tag if shown else wheel.tag.replace("x86_64", "aarch64")
            path.unlink()
            replace(wheel, tag=tag).write(path.parent)
    monkeypatch.setattr(gates.subprocess, "run", tool(shown or "manylinux_2_17_aarch64"))
    monkeypatch.setattr(gates.cross, "crowded", lambda *_: crowded)
    wrong = gates.portable(release, compiled_here=True).wrong
    assert len(wrong) == (3 if words else 0)
    assert all(str(words) in text for text in wrong)


def test_vectors(release: Release) -> None:
    """Wheels for other machines are not looked at; a wheel for aarch64 must have what is looked for."""
    assert gates.vectorised(release) == gates.Gate("vectors", "0 wheels for aarch64", ())
    (path,) = (release.dist / "pypi").glob("scan_registry-*.whl")
    wheel = Wheel.read(path)
    arm = replace(wheel, tag=wheel.tag.replace("x86_64", "aarch64"))
    library = Path(_cpu.__file__).read_bytes()
    arm.with_files({"scan_registry/ops/_cpu.abi3.so": library}).write(path.parent)
    result = gates.vectorised(release)
    assert result.looked_at == "1 wheels for aarch64"
    if cross.foreign({"_cpu.so": library}, "aarch64"):
        assert "not for AArch64" in result.wrong[0]


def test_a_failed_gate_is_told_in_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert gates.judge(gates.Gate("sizes", "2 files", ()))
    assert not gates.judge(gates.Gate("sizes", "2 files", tuple(map(str, range(9)))))
    assert capsys.readouterr().out.splitlines() == [
        *("passed  sizes: 2 files", "FAILED  sizes: 2 files"),
        *("  0", "  1", "  2", "  3", "  4", "  and 4 more"),
    ]
