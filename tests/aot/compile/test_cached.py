"""Compiling a toy family: what is taken from the cache, and what is made again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compiling import COPY, CUDA, HEADER, SM90, Toy

from scan_registry.aot import build, nvrtc
from scan_registry.aot.compile import compile_variant
from scan_registry.aot.plan import Job
from scan_registry.aot.toolchain import CompileError
from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive
from scan_registry.cache.store import Cache
from scan_registry.hardware.target import Target
from scan_registry.kernels import family
from scan_registry.kernels.model import Variant


def test_a_hit_is_the_same_binary(toy: Toy, build_cache: Cache, compiles: list[str]) -> None:
    first = compile_variant(toy.variant, SM90, build_cache)
    assert compile_variant(toy.variant, SM90, build_cache) == first
    assert len(compiles) == 1
    assert compile_variant(toy.variant, SM90) == first  # and so is one compiled anew
    assert len(compiles) == 2


@pytest.mark.parametrize("damage", [b"garbage", "flip"])
def test_a_damaged_entry_is_built_again(
    toy: Toy, build_cache: Cache, compiles: list[str], damage: Any
) -> None:
    first = compile_variant(toy.variant, SM90, build_cache)
    (entry,) = build_cache.folder.rglob(f"*{archive.SUFFIX}")
    whole = entry.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    entry.write_bytes({"cut": whole[:-1], "flip": flipped}.get(damage, damage))
    assert compile_variant(toy.variant, SM90, build_cache) == first
    assert len(compiles) == 2
    assert entry.read_bytes() == whole
    assert compile_variant(toy.variant, SM90, build_cache) == first
    assert len(compiles) == 2


Change = Callable[[Toy, pytest.MonkeyPatch], "tuple[Variant, Target] | None"]


def change_header_of_header(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.write("scale.cuh", f'#include "more.cuh"\n{HEADER}')
    toy.write("more.cuh", "// changed\n")


def change_entry(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both are in the source, so that nothing changes but which one is meant.
    toy.change(entry="other")


def change_constant(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.change(constants=lambda variant: {"SCALE": 3})


def change_warps(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.change(warps=lambda variant: 8)


def change_compiler(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    library, _ = nvrtc._library()
    monkeypatch.setattr(nvrtc, "_library", lambda: (library, "12.9.87"))
    monkeypatch.setattr(nvrtc.Nvrtc, "identity", lambda self: "nvrtc 12.9.87")


def change_target(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> tuple[Variant, Target]:
    return toy.variant, Target.parse("sm90a")


@pytest.mark.parametrize(
    "change",
    [
        change_header_of_header,
        change_entry,
        change_constant,
        change_warps,
        change_compiler,
        change_target,
    ],
    ids=lambda change: change.__name__.removeprefix("change_"),
)
def test_whatever_determines_a_binary_is_in_its_key(
    change: Change,
    toy: Toy,
    build_cache: Cache,
    compiles: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy.write("copy.cu", COPY + COPY.replace("toy", "other").replace("#include", "//"))
    first, _ = compile_variant(toy.variant, SM90, build_cache)
    variant, target = change(toy, monkeypatch) or (toy.variant, SM90)
    second, _ = compile_variant(variant, target, build_cache)
    assert len(compiles) == 2, "the cache gave a binary that was made for something else"
    assert second != first
    # A cached copy of the changed one is as good as compiling it.
    assert compile_variant(variant, target, build_cache)[0] == second
    assert len(compiles) == 2


def test_what_does_not_determine_a_binary_is_not_in_its_key(
    toy: Toy, build_cache: Cache, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_variant(toy.variant, SM90, build_cache)
    elsewhere = toy.folder.parent.with_name("elsewhere")
    shutil.move(toy.folder.parent, elsewhere)
    toy.folder = elsewhere / "toy"
    monkeypatch.setattr(nvrtc, "ROOT", elsewhere)
    os.utime(toy.folder / "copy.cu", (0, 0))
    toy.write("unrelated.cuh", "// not included by anything")
    toy.change(cost=lambda variant, problem: 1.0)
    assert compile_variant(toy.variant, SM90, build_cache) == first
    assert len(compiles) == 1


def test_an_optional_variant_may_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out, and that is said; another one that fails ends the build."""
    bad = Variant.parse(str(CUDA).replace("warps=1", "warps=3"))

    def planned(*jobs: Job) -> None:
        monkeypatch.setattr(build, "plan", lambda archs: {SM90: jobs})

    planned(Job(CUDA, SM90), Job(bad, SM90, optional=True))
    (path,) = build.build_archives(tmp_path / "out", [SM90], tmp_path / "cache", {})
    assert [binary.variant for binary in Archive(path).binaries] == [CUDA]
    assert f"sm90: left out: {bad} for sm_90 did not compile" in capsys.readouterr().err
    planned(Job(CUDA, SM90), Job(bad, SM90))
    with pytest.raises(CompileError, match="did not compile"):
        build.build_archives(tmp_path / "out", [SM90], tmp_path / "cache", {})


def test_an_optional_variant_that_no_such_gpu_has_room_for_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sm89 = Target.parse("sm89")
    kernel = family("linear_scan").kernel("channel_last_forward", "cuda")
    aligned = (item for item in kernel.every if item.text("access") == "aligned")
    large = next(item for item in aligned if kernel.code.shared(item) > 101_376)
    jobs = (Job(CUDA, sm89), Job(large, sm89, optional=True))
    monkeypatch.setattr(build, "plan", lambda archs: {sm89: jobs})
    (path,) = build.build_archives(tmp_path / "out", [sm89], tmp_path / "cache", {})
    assert [binary.variant for binary in Archive(path).binaries] == [CUDA]
    words = capsys.readouterr().err
    assert f"sm89: left out: {large}" in words
    assert "bytes of shared memory per block; sm_89 has 101376" in words
