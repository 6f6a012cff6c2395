"""What tests of ``scan-registry cache`` are given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from caching import SM90, wanted

from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.runtime import jit


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with two binaries for sm_103 and one for sm_90, made by the JIT itself."""
    folder = tmp_path_factory.mktemp("compiled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCAN_REGISTRY_CACHE", str(folder))
        variant, target = wanted()
        cuda = (v for v in FAMILY.variants() if v.language == "cuda")
        other = next(v for v in cuda if v.kernel != variant.kernel)
        for made_of in ((variant, target), (other, target), (variant, SM90)):
            jit.compile(*made_of)
    return folder


@pytest.fixture
def folder(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that cache, for one test; it is the one that the commands look at."""
    copy = tmp_path / "cache"
    shutil.copytree(compiled, copy)
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(copy))
    monkeypatch.setenv("COLUMNS", "200")
    return copy
