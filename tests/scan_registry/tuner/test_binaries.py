"""Where the tuner gets binaries from: an installed archive, else the JIT's cache and compilers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.runtime import jit
from scan_registry.runtime.jit import CompileError
from scan_registry.tuner.binaries import obtain, obtain_all

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]

KERNEL = FAMILY.kernel("time_last_forward", "cuda")
HELD = KERNEL.variants[0]
SPARE = next(v for v in KERNEL.every if v not in KERNEL.variants)

needs_nvrtc = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(tmp_path / "cache"))


def compiled(monkeypatch: pytest.MonkeyPatch, make: Make, **changes: Any) -> list[Any]:
    """Stands in for the compilers; notes what it is asked for."""
    requested: list[Any] = []

    def compile(variant: Any, target: Any, *, alone: bool) -> jit.Compiled:
        assert not alone
        requested.append((variant, str(target)))
        return jit.Compiled(*make(variant, target, **changes), 1.0, False)

    monkeypatch.setattr(jit, "compile", compile)
    return requested


def test_installed_ones_come_first(
    archive_factory: Factory, a_device: Describe, a_binary: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives = [archive_factory("ptx80"), archive_factory("sm90")]
    requested = compiled(monkeypatch, a_binary)
    assert obtain(a_device(), archives, HELD) == a_binary(HELD, "sm90")
    assert requested == []


@needs_nvrtc
@pytest.mark.parametrize("capability", [(9, 0), (10, 3)])
def test_others_are_compiled_for_the_device(
    archive_factory: Factory,
    a_device: Describe,
    a_binary: Make,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
) -> None:
    """What an archive holds for other devices, or as PTX, is none for this one."""
    archives = [archive_factory("ptx80"), archive_factory("sm100")]
    requested = compiled(monkeypatch, a_binary)
    obtain(a_device(capability), archives, HELD)
    assert requested == [(HELD, f"sm_{capability[0]}{capability[1]}")]


def test_a_damaged_archive_is_passed_over(
    archive_factory: Factory,
    a_device: Describe,
    a_binary: Make,
    archive_parts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    archive = archive_factory("sm90", variants=[HELD])
    archive.path.write_bytes(archive_parts.flipped(archive.path.read_bytes()))
    monkeypatch.setattr("scan_registry.tuner.binaries._compiled", lambda *_: a_binary(HELD))
    assert obtain(a_device(), [archive], HELD) == a_binary(HELD)


@needs_nvrtc
def test_what_spills_or_does_not_fit_is_none(
    a_device: Describe, a_binary: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(monkeypatch, a_binary, spill_bytes=8)
    with pytest.raises(CompileError, match="it spills 8 bytes per thread"):
        obtain(a_device(), [], SPARE)
    compiled(monkeypatch, a_binary, static_shared=10**6)
    with pytest.raises(CompileError, match="bytes of shared memory per block"):
        obtain(a_device(), [], SPARE)


def test_without_a_compiler(a_device: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "toolchains", lambda: {"cuda": "NVRTC is not installed"})
    assert obtain_all(a_device(), [], [SPARE]) == {SPARE: "NVRTC is not installed"}


@needs_nvrtc
def test_many_are_compiled_side_by_side(a_device: Describe) -> None:
    """With the real compiler: the bytes are those of the JIT's cache."""
    wanted = [v for v in KERNEL.every if v.text("dtype") == "float32"][:4]
    broken = Variant.parse(str(wanted[0]).replace("warps=1", "warps=3"))
    assert "did not compile" in str(obtain_all(a_device(), [], [broken])[broken])
    actual = obtain_all(a_device(), [], [*wanted, *wanted])
    assert [*actual] == wanted
    triton = FAMILY.kernel(KERNEL.name, "triton").variants[0]
    if not isinstance(jit.toolchains()["triton"], str):
        actual = {**actual, **obtain_all(a_device(), [], [triton])}
    for variant, contents in actual.items():
        assert not isinstance(contents, str), contents
        assert contents[0].variant == variant
        assert jit.compile(variant, Target.parse("sm90")).cached
