"""Small packages to try the scripts of ci/ on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ci.matrix import load
from ci.products import ARCHIVES, Parts, parts
from scan_registry.artifact import archive
from scan_registry.artifact.archive import Binary
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.packaging.wheel import Wheel

VERSION = "0.1.0"
TAG = "cp310-abi3-manylinux_2_28_x86_64"
METADATA = f"Metadata-Version: 2.4\nName: scan-registry\nVersion: {VERSION}\nSummary: small\n"
CORE = Wheel(
    "scan_registry",
    VERSION,
    TAG,
    {
        "scan_registry/__init__.py": b"",
        "scan_registry/hardware/_launcher.abi3.so": b"for x86_64",
        "scan_registry/version.py": f'__version__ = "{VERSION}"\n'.encode(),
    },
    {
        "METADATA": METADATA.encode(),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode(),
        "licenses/LICENSE": b"free",
    },
)
ORIGIN = {"version": VERSION, "commit": "c0ffee" * 6 + "beef", "dirty": False}


@pytest.fixture
def core() -> Wheel:
    """The package without archives, as small as can be."""
    return CORE


@pytest.fixture(scope="session")
def packed(
    a_binary: Callable[..., tuple[Binary, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., bytes]:
    """An archive's bytes, with one made-up binary for each of two variants; keywords change the
    binaries, ``origin`` where they come from."""

    def make(label: str, origin: Any = ORIGIN, **changes: Any) -> bytes:
        target = Target.parse(label)
        path = tmp_path_factory.mktemp("packed") / f"{label}{archive.SUFFIX}"
        created = [a_binary(variant, target, **changes) for variant in FAMILY.variants()[:2]]
        archive.write(path, target, created, origin)
        return path.read_bytes()

    return make


@pytest.fixture(scope="session")
def job(packed: Callable[..., bytes]) -> Callable[..., Wheel]:
    """The wheel of a build job, with these archives."""

    def make(*labels: str, **changes: Any) -> Wheel:
        return CORE.with_files(
            {f"{ARCHIVES}/{label}{archive.SUFFIX}": packed(label, **changes) for label in labels}
        )

    return make


@pytest.fixture(scope="session")
def small(job: Callable[..., Wheel]) -> Parts:
    """What the jobs of the matrix make, small."""
    return parts([job(arch.label) for arch in load().archs], load())
