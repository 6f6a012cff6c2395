"""The packages of a release, from the wheels of its jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from ci import sbom
from ci.matrix import load
from ci.products import ARCHIVES, Parts, parts, write
from ci.workspace import DevError
from scan_registry.catalog import providers
from scan_registry.hardware.target import RELEASED, Target
from scan_registry.packaging.wheel import Wheel

Job = Callable[..., Wheel]


@pytest.fixture(scope="module")
def dist(small: Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("products") / "dist"
    write(small, load(), folder)
    return folder


def wheels(folder: Path) -> dict[tuple[str, str], Wheel]:
    """By name and version, without variants."""
    paths = [path for path in folder.glob("*.whl") if path.name.count("-") == 4]
    return {(w.name, w.version): w for w in map(Wheel.read, paths)}


def held(wheel: Wheel) -> list[str]:
    return [Path(name).stem for name in wheel.files if name.endswith(".scanreg")]


def test_the_default_wheel_has_every_archive(dist: Path, small: Parts) -> None:
    whole = wheels(dist / "pypi")["scan_registry", "0.1.0"]
    assert held(whole) == list(RELEASED)
    for target, content in small.archives.items():
        assert whole.files[f"{ARCHIVES}/{target.label}.scanreg"] == content


def test_each_architecture_has_a_package_with_its_archive(dist: Path, small: Parts) -> None:
    created = wheels(dist / "pypi")
    assert {name for name, _ in created} == {
        "scan_registry",
        *(f"scan_registry_{a}" for a in RELEASED),
    }
    for label in RELEASED:
        wheel = created[f"scan_registry_{label}", "0.1.0"]
        assert wheel.tag == "py3-none-any"
        assert held(wheel) == [label]
        module = f"scan_registry_{label}"
        assert (
            wheel.files[f"{module}/archives/{label}.scanreg"] == small.archives[Target.parse(label)]
        )
        manifest = json.loads(wheel.files[f"{module}/provider.json"])
        assert manifest["core"] == providers.core_range("0.1.0")


def test_the_labels_of_the_projects_own_index(dist: Path) -> None:
    created = wheels(dist / "index")
    assert {version for _, version in created} == {"0.1.0+cu129", "0.1.0+core"}
    assert {(n, v) for n, v in created if v.endswith("core")} == {("scan_registry", "0.1.0+core")}
    assert held(created["scan_registry", "0.1.0+core"]) == []
    assert held(created["scan_registry", "0.1.0+cu129"]) == list(RELEASED)


def test_licence_and_bill_are_in_every_wheel(dist: Path) -> None:
    for folder in ("pypi", "index"):
        for (name, version), wheel in wheels(dist / folder).items():
            assert wheel.information["licenses/LICENSE"]
            bill = json.loads(wheel.information[sbom.PATH])
            assert bill["bomFormat"] == "CycloneDX"
            component = bill["metadata"]["component"]
            assert (component["name"], component["version"]) == (name.replace("_", "-"), version)
            assert [part["name"] for part in bill["components"]] == [
                f"{a}.scanreg" for a in held(wheel)
            ]
            for part in bill["components"]:
                facts = {item["name"]: item["value"] for item in part["properties"]}
                assert facts["scan-registry:version"] == "0.1.0"
                assert facts["scan-registry:commit"].startswith("c0ffee")
                assert facts["scan-registry:dirty"] == "False"


def test_a_providers_metadata(dist: Path, tmp_path: Path) -> None:
    wheel = wheels(dist / "pypi")["scan_registry_sm90", "0.1.0"]
    folder = tmp_path / "x.dist-info"
    folder.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (folder / name).write_bytes(wheel.information[name])
    result = Distribution.at(folder)
    assert result.metadata["Name"] == "scan-registry-sm90"
    assert result.metadata["License-Expression"] == "Apache-2.0"
    assert result.requires == ["scan-registry>=0.1.0,<0.2"]
    (point,) = result.entry_points
    assert (point.group, point.value) == (providers.GROUP, "scan_registry_sm90")
    assert "sm90" in (result.metadata.get_payload() or "")


def test_the_same_parts_give_the_same_files(small: Parts, dist: Path, tmp_path: Path) -> None:
    write(small, load(), tmp_path / "again")
    for path in dist.rglob("*"):
        if path.is_file():
            assert (tmp_path / "again" / path.relative_to(dist)).read_bytes() == path.read_bytes()


def test_a_missing_architecture(job: Job) -> None:
    with pytest.raises(DevError, match="no build has an archive for sm120, ptx80"):
        parts([job(label) for label in RELEASED[:-2]], load())
    with pytest.raises(DevError, match="no wheel"):
        parts([], load())


def test_two_archives_for_one_architecture(job: Job) -> None:
    every = [job(label) for label in RELEASED]
    assert parts([*every, every[0]], load()).archives
    with pytest.raises(DevError, match="two builds of the archive for sm_80 differ"):
        parts([*every, job("sm80", registers=41)], load())


@pytest.mark.parametrize(
    "origin",
    [
        {"version": "0.1.0", "commit": "another", "dirty": False},
        {"version": "0.1.0", "commit": "c0ffee" * 6 + "beef", "dirty": True},
    ],
)
def test_archives_of_different_commits(job: Job, origin: Any) -> None:
    created = [job(label) for label in RELEASED[1:]]
    with pytest.raises(DevError, match="not compiled from the same commit: sm80: "):
        parts([job("sm80", origin=origin), *created], load())


def test_archives_of_another_version(job: Job) -> None:
    origin = {"version": "0.2.0", "commit": None, "dirty": None}
    with pytest.raises(DevError, match=r"compiled by 0\.2\.0, the package is 0\.1\.0"):
        parts([job(label, origin=origin) for label in RELEASED], load())


def test_builds_that_differ(job: Job, core: Wheel) -> None:
    every = [job(label) for label in RELEASED]
    with pytest.raises(DevError, match="differ in more than their archives"):
        parts([*every, core.with_files({"scan_registry/__init__.py": b"# other"})], load())
    # Containers may compile the CPU's code differently.
    parts([*every, core.with_files({"scan_registry/hardware/_launcher.abi3.so": b"also"})], load())


def test_another_platform_has_the_same_archives(job: Job, core: Wheel, tmp_path: Path) -> None:
    arm = replace(core, tag=core.tag.replace("x86_64", "aarch64"))
    result = parts([*(job(label) for label in RELEASED), arm], load())
    assert [wheel.tag for wheel in result.cores] == [core.tag, arm.tag]
    write(result, load(), tmp_path)
    names = {path.name for path in (tmp_path / "pypi").iterdir()}
    assert {f"scan_registry-0.1.0-{tag}.whl" for tag in (core.tag, arm.tag)} <= names
    other = arm.with_files({"scan_registry/__init__.py": b"# other"})
    with pytest.raises(DevError, match="differ in more than machine code for CPUs"):
        parts([*(job(label) for label in RELEASED), other], load())
    old = replace(arm, version="0.0.9")
    with pytest.raises(DevError, match="different versions"):
        parts([job(label) for label in RELEASED] + [old], load())
