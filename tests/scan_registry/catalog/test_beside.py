"""The package finds its archives and its version beside its own code, whatever else lies there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, version
from pathlib import Path
from typing import Any

import pytest
from processes import captured

import scan_registry
from scan_registry.catalog import inventory, providers
from scan_registry.catalog.providers import CORE, GROUP
from scan_registry.diagnostics import verify

PACKAGE = Path(scan_registry.__file__).parent
OWN = version(CORE)
STALE = "scan_registry-0.0.9.dist-info"
METADATA = "Metadata-Version: 2.1\nName: scan-registry\nVersion: 0.0.9\n"
POINTS = f"[{GROUP}]\ncore = scan_registry\n"

ASK = """
import json, scan_registry
from scan_registry.catalog import inventory
found = inventory.catalogue()
print(json.dumps([scan_registry.__version__, [archive.path.name for archive in found.archives],
                  [[each.name, each.version, str(each.folder)] for each in found.providers]]))
"""


def leave(site: Path, what: str) -> None:
    """What an installer, or another copy, may leave beside the package."""
    name = STALE.replace("scan_", "~can_") if what == "of a killed pip" else STALE
    if what == "nothing":
        return
    if what == "a broken link":
        (site / name).symlink_to(site / "gone")
        return
    (site / name).mkdir()
    if what != "an empty folder":
        (site / name / "METADATA").write_text(METADATA, encoding="utf-8")
    if what in ("of a killed pip", "all of it"):
        (site / name / "entry_points.txt").write_text(POINTS, encoding="utf-8")
        (site / name / "RECORD").write_text("", encoding="utf-8")


@pytest.fixture(params=["nothing", "a broken link", "all of it"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with the package, as if it were copied there, and something left by another."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "scan_registry").symlink_to(PACKAGE)
    leave(folder, request.param)
    return folder


def run(site: Path, *words: str) -> str:
    done = captured(
        [sys.executable, *words], cwd=site.parent, env={**os.environ, "PYTHONPATH": str(site)}
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("alone", [True, False])
def test_the_package_finds_what_lies_beside_its_code(site: Path, alone: bool) -> None:
    """Where its own metadata is elsewhere on the path, and where there is none."""
    archives = sorted(path.name for path in (PACKAGE / "archives").glob("*.scanreg"))
    own, result, contents = json.loads(run(site, *(["-S"] if alone else []), "-c", ASK))
    assert own == OWN
    assert sorted(result) == archives
    assert contents == [[CORE, OWN, str(site / "scan_registry")]]


@pytest.mark.parametrize("site", ["all of it"], indirect=True)
def test_commands_state_the_version_of_the_code(site: Path) -> None:
    assert run(site, "-m", "scan_registry", "--version") == f"scan-registry {OWN}\n"
    arch = "sm_90"
    seen = json.loads(run(site, "-m", "scan_registry", "doctor", "--for", arch, "--json"))
    assert seen["version"] == OWN
    assert [(provider["name"], provider["version"]) for provider in seen["providers"]] == [
        (CORE, OWN)
    ]


@pytest.fixture
def fresh_catalogue() -> Iterator[None]:
    inventory.catalogue.cache_clear()
    yield
    inventory.catalogue.cache_clear()


@pytest.mark.usefixtures("fresh_catalogue")
@pytest.mark.parametrize("what", ["an empty folder", "of a killed pip"])
def test_what_another_version_left_says_nothing_of_these_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whether they are as they were installed is in the record of this version."""
    requested: list[Path] = []
    real = Distribution.at

    def at(folder: Any) -> Distribution:
        requested.append(Path(folder))
        return real(folder)

    leave(tmp_path, what)
    monkeypatch.setattr(Distribution, "at", at)
    monkeypatch.syspath_prepend(str(tmp_path))
    (own, *_), problems = providers.installed()
    assert not problems
    assert verify.altered(own) == []
    assert tmp_path / STALE not in requested


def test_there_is_one_place_that_states_the_version() -> None:
    """Nothing in the package asks for the metadata of its own distribution."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert 'version("scan-registry")' not in text, path
        assert "version(CORE)" not in text, path
