"""The same sources give the same bytes, wherever they lie."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import scan_registry
import scan_registry.aot
import scan_registry.kernels

LINEAR_SCAN = scan_registry.kernels.family("linear_scan")
CUDA = LINEAR_SCAN.kernel("time_last_forward", "cuda").variants[0]
TRITON = LINEAR_SCAN.kernel("time_last_forward", "triton").variants[0]

DIGESTS = """
import json, scan_registry
from scan_registry.aot.compile import compile_variant
from scan_registry.kernels.model import Variant
from scan_registry.hardware.target import Target
compiled = [compile_variant(Variant.parse(v), Target.parse("sm90")) for v in {variants!r}]
print(json.dumps([scan_registry.__file__, *(binary.to_json() for binary, _ in compiled)]))
"""


def copy_of_the_tree(place: Path) -> None:
    """The package as it would be installed in ``place``."""
    for package in (scan_registry, scan_registry.kernels, scan_registry.aot):
        assert package.__file__ is not None
        shutil.copytree(
            Path(package.__file__).parent,
            place.joinpath(*package.__name__.split(".")),
            ignore=shutil.ignore_patterns("archives", "__pycache__", "*.so"),
            dirs_exist_ok=True,
        )


def start(place: Path) -> subprocess.Popen[str]:
    copy_of_the_tree(place)
    home = place / "home"
    home.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(place), "HOME": str(home)}
    script = DIGESTS.format(variants=[str(CUDA), str(TRITON)])
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=home,
        env=environment,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
    )


@pytest.fixture
def two_copies(tmp_path: Path) -> Iterator[list[tuple[Path, subprocess.Popen[str]]]]:
    places = [tmp_path / "a", tmp_path / "another" / "place" / "altogether"]
    running = [(place, start(place)) for place in places]
    yield running
    for _, process in running:
        process.kill()
        process.communicate()


def test_the_same_bytes_in_two_folders(
    two_copies: list[tuple[Path, subprocess.Popen[str]]],
) -> None:
    outcomes = []
    for place, process in two_copies:
        out, _ = process.communicate(timeout=120)
        imported, *binaries = json.loads(out)
        assert Path(imported).is_relative_to(place)
        outcomes.append(binaries)
    assert outcomes[0] == outcomes[1]
    assert [record["variant"] for record in outcomes[0]] == [str(CUDA), str(TRITON)]
