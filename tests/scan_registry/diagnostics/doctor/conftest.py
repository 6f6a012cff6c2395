"""What tests of ``doctor`` are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from diagnosing import FEW, HELD, Make, Provide
from imaginary import MISSING

from scan_registry.artifact import archive
from scan_registry.catalog import providers
from scan_registry.catalog.providers import Provider
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Variant


@pytest.fixture
def provide(
    tmp_path: Path,
    a_binary: Make,
    monkeypatch: pytest.MonkeyPatch,
    _written: dict[object, bytes],
) -> Provide:
    """Installs an imaginary provider, beside those before it and instead of the real ones; doctor is asked of few families."""
    installed: list[Provider] = []
    monkeypatch.setattr(providers, "installed", lambda: (tuple(installed), ()))
    monkeypatch.setattr("scan_registry.runtime.jit.toolchains", lambda: MISSING)
    monkeypatch.setattr("scan_registry.kernels.families", lambda: FEW)
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")

    def make(
        name: str = "scan-registry",
        archs: Iterable[str] = (),
        *,
        core: str = ">=0.1",
        denied: Mapping[str, str] | None = None,
        variants: Iterable[Variant] = HELD,
    ) -> Provider:
        folder, held = tmp_path / name, tuple(variants)
        for arch in archs:
            target = Target.parse(arch)
            path = folder / "archives" / f"{target.label}{archive.SUFFIX}"
            if (arch, held) not in _written:
                entries = [a_binary(variant, target) for variant in held]
                archive.write(path, target, entries, {"version": "9.9.9"})
                _written[arch, held] = path.read_bytes()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_written[arch, held])
        installed.append(Provider(name, "1.2", folder, core, dict(denied or {})))
        return installed[-1]

    return make
