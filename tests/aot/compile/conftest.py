"""What tests of compiling are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiling import Toy, compiling

from scan_registry.aot import nvrtc
from scan_registry.cache.store import Cache
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Kernel, Variant


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    created = Toy(tmp_path / "kernels" / "toy")
    monkeypatch.setattr(nvrtc, "ROOT", tmp_path / "kernels")
    monkeypatch.setattr(compiling, "family", created.family)
    return created


@pytest.fixture
def build_cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever NVRTC is run."""
    run: list[str] = []
    original = nvrtc.Nvrtc.compile

    def counted(self: nvrtc.Nvrtc, kernel: Kernel, variant: Variant, *rest: Any) -> Any:
        run.append(str(variant))
        return original(self, kernel, variant, *rest)

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", counted)
    return run


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that NVRTC compiles for, from the source on."""
    run: list[str] = []
    images = nvrtc.Nvrtc._images

    def recorded(self: nvrtc.Nvrtc, kernel: Kernel, variant: Variant, target: Target) -> Any:
        run.append(str(target))
        return images(self, kernel, variant, target)

    monkeypatch.setattr(nvrtc.Nvrtc, "_images", recorded)
    return run
