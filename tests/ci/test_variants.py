"""Wheel variants: uv's preview chooses by the GPU, everything else takes the default wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ci import variants
from ci.products import Parts, fat
from scan_registry.hardware.target import RELEASED, Target
from scan_registry.packaging.wheel import Wheel


def made(small: Parts, *labels: str) -> dict[Target, Wheel]:
    return {t: fat(small.cores[0], {t: small.archives[t]}) for t in map(Target.parse, labels)}


def universal(wheel: Wheel) -> Wheel:
    """For the machine that runs the tests, whatever it is."""
    return Wheel(wheel.name, wheel.version, "py3-none-any", wheel.files, wheel.information)


@pytest.fixture
def index(small: Parts, tmp_path: Path) -> Path:
    folder = tmp_path / "variants"
    default = universal(fat(small.cores[0], small.archives))
    chosen = {t: universal(wheel) for t, wheel in made(small, "sm80", "sm90").items()}
    variants.write(default, chosen, folder)
    return folder


def archives(target: Path) -> set[str]:
    return {path.stem for path in (target / "scan_registry" / "archives").iterdir()}


def uv(index: Path, target: Path, *words: str, **environment: str) -> set[str]:
    """The archives that uv installs."""
    program = Path(sys.executable).with_name("uv")
    assert program.is_file(), "pip install -r ci/requirements.txt"
    command = [str(program), "pip", "install", "--no-cache", "--no-index", "--no-deps", *words]
    command += ["--python", sys.executable, "--find-links", str(index), "--target", str(target)]
    subprocess.run(
        [*command, "scan-registry"],
        env={**os.environ, **environment},
        check=True,
        cwd=target.parent,
    )
    return archives(target)


@pytest.mark.parametrize(("capability", "expected"), [("8.6", {"sm80"}), ("12.0", {*RELEASED})])
def test_uvs_preview_chooses_by_the_gpu(
    index: Path, tmp_path: Path, capability: str, expected: set[str]
) -> None:
    gpu = {
        "NV_VARIANT_PROVIDER_FORCE_SM_ARCH": capability,
        "NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION": "13.0",
    }
    preview = ("--preview-features", "wheel-variants")
    assert uv(index, tmp_path / "there", *preview, **gpu) == expected


def test_uv_without_the_preview_takes_the_default(index: Path, tmp_path: Path) -> None:
    assert len(uv(index, tmp_path / "there")) == 7


def test_pip_takes_the_default(index: Path, tmp_path: Path) -> None:
    target = tmp_path / "there"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--find-links", str(index), "--target", str(target), "scan-registry"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert len(archives(target)) == 7


def test_a_variants_record_is_right(index: Path) -> None:
    (path,) = index.glob("*-sm90.whl")
    plain = path.rename(
        path.with_name(path.name.replace("-sm90.whl", ".whl").replace("0.1.0", "0.1.0"))
    )
    read = Wheel.read(plain)
    assert variants.SCHEMA.encode() in read.information[variants.METADATA]
    with zipfile.ZipFile(plain) as archive:
        record = archive.read("scan_registry-0.1.0.dist-info/RECORD").decode()
        assert "scan_registry-0.1.0.dist-info/variant.json,sha256=" in record
