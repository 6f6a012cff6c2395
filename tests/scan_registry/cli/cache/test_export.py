"""``scan-registry cache export``, and installing what it made."""

from __future__ import annotations

import json
import os
import shutil
import sys
import venv
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from caching import Capture, add, document, only, paths, refused, run
from processes import captured

from scan_registry.artifact.archive import Archive
from scan_registry.cache.store import Cache
from scan_registry.catalog.inventory import Catalogue
from scan_registry.catalog.providers import core_range
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.packaging.export import contents

# --- export -----------------------------------------------------------------------------------


def test_what_a_package_holds(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    place = tmp_path / "package"
    report = document(capsys, "export", str(place))
    name = "scan-registry-jit-sm90-sm103"
    assert report["name"] == name
    assert report["version"].startswith(f"{version('scan-registry')}+c")
    assert report["core"] == core_range(version("scan-registry"))
    assert report["archives"] == [
        {"arch": "sm_90", "binaries": 1},
        {"arch": "sm_103", "binaries": 2},
    ]
    assert (report["wheel"], report["left_out"]) == (None, [])
    package = place / name.replace("-", "_")
    assert sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()) == [
        "pyproject.toml",
        f"{package.name}/__init__.py",
        f"{package.name}/archives/sm103.scanreg",
        f"{package.name}/archives/sm90.scanreg",
        f"{package.name}/provider.json",
    ]
    packed = {
        binary.sha256: Archive(path).read(binary)
        for path in (package / "archives").iterdir()
        for binary in Archive(path).binaries
    }
    assert packed == {binary.sha256: content for binary, content in map(only, paths(folder))}
    order = [str(b.variant) for b in Archive(package / "archives" / "sm103.scanreg").binaries]
    assert order == [str(v) for v in FAMILY.variants() if str(v) in order]


def test_the_same_cache_gives_the_same_bytes(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Path(document(capsys, "export", str(tmp_path / "a"), "--wheel")["wheel"])
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)  # other times
    copy.chmod(0o700)
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(copy))
    second = Path(document(capsys, "export", str(tmp_path / "b"), "--wheel")["wheel"])
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    one_arch = document(capsys, "export", str(tmp_path / "c"), "--arch", "SM_90")
    assert one_arch["archives"] == [{"arch": "sm_90", "binaries": 1}]
    assert one_arch["version"] not in first.name


def test_what_is_left_out(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """What is stale, damaged, or was made by an older compiler than another."""
    first, second, third = paths(folder)
    binary, _ = only(first)
    stale = add(folder, second, source_sha256="ab" * 32)
    older = add(folder, first, compiler="nvrtc 12.9.9")
    newer = add(folder, first, compiler="nvrtc 900.1")
    content = bytearray(third.read_bytes())
    content[-1] ^= 1
    third.write_bytes(content)
    place = tmp_path / "package"
    report = document(capsys, "export", str(place), "--name", "mine")
    reasons = {entry["path"]: entry["reason"] for entry in report["left_out"]}
    assert set(reasons) == {str(stale), str(older), str(first), str(third)}
    assert reasons[str(older)] == reasons[str(first)] == "nvrtc 900.1 has made it, too"
    assert "sources" in reasons[str(stale)]
    assert "has SHA-256" in reasons[str(third)]
    packed = [
        b.compiler
        for path in (place / "scan_registry_mine" / "archives").iterdir()
        for b in Archive(path).binaries
        if b.variant == binary.variant and b.target == binary.target
    ]
    assert packed == [only(newer)[0].compiler]


def test_versions_are_compared_as_numbers(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """12.10 is newer than 12.9."""
    for path in paths(folder):
        add(folder, path, compiler="nvrtc 900.10")
        add(folder, path, compiler="nvrtc 900.9")
    place = tmp_path / "package"
    report = document(capsys, "export", str(place), "--name", "mine")
    assert len(report["left_out"]) == 6
    for path in (place / "scan_registry_mine" / "archives").iterdir():
        assert {binary.compiler for binary in Archive(path).binaries} == {"nvrtc 900.10"}


def test_what_is_denied_is_left_out(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [only(path)[0] for path in paths(folder)]
    result, denied = Catalogue(()), entries[0]
    others = {
        denied.sha256: entries[1:],
        str(denied.variant): [item for item in entries if item.variant != denied.variant],
    }
    for number, (subject, kept) in enumerate(others.items()):
        result.denied = {subject: "denied: it hangs (somebody 1.0)"}
        monkeypatch.setattr("scan_registry.cli.cache.catalogue", lambda: result)
        created = document(capsys, "export", str(tmp_path / f"package{number}"))
        assert {item["reason"] for item in created["left_out"]} == set(result.denied.values())
        assert sum(archive["binaries"] for archive in created["archives"]) == len(kept)


def test_nothing_to_export(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "package"
    assert "accepted are: sm" in refused(capsys, "export", str(place), "--arch", "sm75")
    for path in paths(folder):
        add(folder, path, source_sha256="ab" * 32)
        path.unlink()
    assert "holds nothing to export: is made with sources" in refused(capsys, "export", str(place))
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(tmp_path / "none"))
    assert f"{tmp_path / 'none'} is empty" in refused(capsys, "export", str(place))
    assert not place.exists()


@pytest.mark.parametrize("name", ["", "Mine", "a--b", "../a"])
def test_a_name_that_names_no_package(
    folder: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    error = refused(capsys, "export", str(tmp_path / "package"), f"--name={name}")
    assert f"--name {name!r}" in error
    assert "lower-case letters" in error


@pytest.mark.parametrize("name", ["sm90a", "sm90-ptx80"])
def test_a_name_of_architectures_alone_is_not_for_exports(
    folder: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    """pip would take it for a package that this project releases, and replace one by the other."""
    error = refused(capsys, "export", str(tmp_path / "package"), f"--name={name}")
    assert f"--name {name!r}: scan-registry-{name} is kept for packages that are released" in error
    assert f"such as my-{name}" in error
    assert not (tmp_path / "package").exists()
    created = document(capsys, "export", str(tmp_path / "package"), f"--name=my-{name}")
    assert created["name"] == f"scan-registry-my-{name.replace('_', '-')}"


def test_places_that_cannot_be_written(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("keep", encoding="utf-8")
    assert f"{full} is not empty" in refused(capsys, "export", str(full))
    assert "Not a directory" in refused(capsys, "export", str(full / "mine"))
    folder.chmod(0o777)
    assert "others can write to it" in refused(capsys, "export", str(tmp_path / "package"))
    folder.chmod(0o700)
    assert [path.name for path in full.iterdir()] == ["mine"]
    empty = tmp_path / "empty"
    empty.mkdir()
    run(capsys, "export", str(empty))


def test_what_the_cache_itself_refuses_is_not_exported(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry may be intact, and yet where others could have put it."""
    refused_key = paths(folder)[0].parent.name
    contents = Cache.get

    def get(self: Cache, key: str, target: Target) -> Any:
        return None if key == refused_key else contents(self, key, target)

    monkeypatch.setattr(Cache, "get", get)
    report = document(capsys, "export", str(tmp_path / "package"))
    (left,) = report["left_out"]
    assert left["path"] == str(paths(folder)[0])
    assert "the cache does not use it" in left["reason"]


# --- Installing what was exported -------------------------------------------------------------


SELECT = """
import json
from scan_registry.hardware.device import described
from scan_registry.catalog.inventory import catalogue
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.dispatch.select import System, select

found = catalogue()
problem = next(s for s in FAMILY.samples if s.problem.kernel == "time_last_forward").problem
decision = select(System(described((10, 3)), found.archives, denied=found.denied), FAMILY, problem)
winner = decision.taken()
winner.archive.read(winner.binary)
print(json.dumps({
    "providers": [[p.name, p.version] for p in found.providers],
    "tier": str(winner.tier), "variant": str(winner.variant), "from": winner.archive.provider,
}))
"""


def quiet(*command: str | Path, **environment: str) -> str:
    """The output of a command that must succeed; its packages are those of this process."""
    result = captured(
        list(map(str, command)),
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        cwd="/",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_wheel_installs_offline_and_its_binaries_are_exact(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    """pip finds its requirement, scan-registry itself, among what is installed, and no index."""
    wheel = document(capsys, "export", str(tmp_path / "package"), "--wheel")["wheel"]
    place = tmp_path / "venv"
    venv.EnvBuilder(symlinks=True).create(place)
    (packages,) = place.glob("lib/python*/site-packages")
    # As a site folder, so that an editable installation in it is found, too.
    lines = [f"import site; site.addsitedir({path!r})" for path in sys.path if path]
    (packages / "those-of-the-tests.pth").write_text("\n".join(lines), encoding="utf-8")
    python = place / "bin" / "python"
    quiet(python, "-m", "pip", "install", "--no-index", wheel)
    report = json.loads(quiet(python, "-c", SELECT))
    assert report["tier"] == "exact"
    assert report["variant"] in {str(only(path)[0].variant) for path in paths(folder)}
    assert report["from"] == "scan-registry-jit-sm90-sm103"
    assert [name for name, _ in report["providers"]] == ["scan-registry", report["from"]]
    # What is installed is held against the wheel's RECORD, which pip has kept.
    words = [python, "-m", "scan_registry", "verify", "--arch", "sm103", "--json"]
    verified = json.loads(quiet(*words))
    assert [(a["provider"], a["intact"]) for a in verified["archives"]] == [(report["from"], 2)]


def test_the_wheel_keeps_to_the_specification(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    """RECORD has every file with its digest and size, and itself without; nothing has a time."""
    created = document(capsys, "export", str(tmp_path / "package"), "--wheel", "--name", "mine")
    information = f"scan_registry_mine-{created['version']}.dist-info"
    assert (
        Path(created["wheel"]).name == f"scan_registry_mine-{created['version']}-py3-none-any.whl"
    )
    with zipfile.ZipFile(created["wheel"]) as wheel:
        rows = [line.split(",") for line in wheel.read(f"{information}/RECORD").decode().split()]
        assert [row[0] for row in rows] == wheel.namelist()
        assert rows[-1] == [f"{information}/RECORD", "", ""]
        for name, stated, size in rows[:-1]:
            content = wheel.read(name)
            encoded = urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
            assert (stated, size) == (f"sha256={encoded}", str(len(content)))
        assert {entry.date_time for entry in wheel.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {entry.external_attr >> 16 for entry in wheel.infolist()} == {0o100644}


def test_setuptools_makes_the_same_package(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    created = document(capsys, "export", str(tmp_path / "package"), "--wheel", "--name", "my-gpu")
    words = ["wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    quiet(sys.executable, "-m", "pip", *words, tmp_path / "built", created["folder"])
    (built,) = (tmp_path / "built").iterdir()
    ours = Path(created["wheel"])
    assert built.name == ours.name

    def content(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as wheel:
            assert wheel.testzip() is None
            return {name: wheel.read(name) for name in wheel.namelist()}

    theirs, mine = content(built), content(ours)
    shared = [name for name in mine if not name.endswith(("/METADATA", "/WHEEL", "/RECORD"))]
    assert {name: mine[name] for name in shared} == {name: theirs[name] for name in shared}
    assert sorted(name for name in mine if ".dist-info" not in name) == sorted(
        name for name in theirs if ".dist-info" not in name
    )
    metadata = f"scan_registry_my_gpu-{created['version']}.dist-info/METADATA"
    (needs,) = [line for line in theirs[metadata].decode().splitlines() if "Requires-Dist" in line]
    assert needs.startswith("Requires-Dist: scan-registry")
    assert all(part in needs for part in created["core"].split(","))


def test_an_entry_that_disappears_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody clears the cache while it is listed."""
    kept: Callable[[Cache], Any] = Cache.entries

    def entries(self: Cache) -> Any:
        for number, entry in enumerate(list(kept(self))):
            if number == 0:
                entry.path.unlink()
            yield entry

    monkeypatch.setattr(Cache, "entries", entries)
    assert len(list(contents(Cache(folder)))) == 2
