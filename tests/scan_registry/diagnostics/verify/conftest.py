"""What tests of ``verify`` are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from verifying import FIRST, PTX80, SECOND, SM103, Entry, Install, record

from scan_registry.aot.compile import compile_variant
from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive
from scan_registry.catalog import providers
from scan_registry.catalog.inventory import Catalogue
from scan_registry.cli import verify as command
from scan_registry.hardware.target import Target


@pytest.fixture(scope="session")
def compiled() -> dict[str, list[Entry]]:
    """Real binaries: two for sm_103, and PTX."""
    return {
        "sm103": [compile_variant(variant, SM103) for variant in (FIRST, SECOND)],
        "ptx80": [compile_variant(FIRST, PTX80)],
    }


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Writes an archive and makes it one of those that the command finds."""
    entries: list[Archive] = []

    def make(label: str, binaries: list[Entry]) -> Archive:
        path = tmp_path / f"{label}{archive.SUFFIX}"
        archive.write(path, Target.parse(label), binaries, {"version": "9.9.9"})
        entries.append(Archive(path, "made-up"))
        monkeypatch.setattr(command, "survey", lambda: (Catalogue(tuple(entries)), ()))
        return entries[-1]

    monkeypatch.setattr(command, "survey", lambda: (Catalogue(()), ()))
    monkeypatch.setenv("COLUMNS", "120")
    return make


@pytest.fixture
def provided(tmp_path: Path, compiled: dict[str, list[Entry]]) -> Path:
    """A folder with a provider in it, as pip would have installed it."""
    site = tmp_path / "site"
    package = site / "archives_that_are_verified"
    path = package / "archives" / f"sm103{archive.SUFFIX}"
    archive.write(path, SM103, compiled["sm103"], {"version": "1.2.3"})
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    (package / "provider.json").write_text('{"schema": 1, "core": ">=0"}', encoding="utf-8")
    information = site / "verified-1.2.3.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: verified\nVersion: 1.2.3\n", encoding="utf-8"
    )
    entry = f"[{providers.GROUP}]\nverified = {package.name}\n"
    (information / "entry_points.txt").write_text(entry, encoding="utf-8")
    record(site)
    return site
