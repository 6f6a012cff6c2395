"""A warm cache, and the commands that look at it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.cache.store import Cache
from scan_registry.cli import main
from scan_registry.dispatch.select import System, select
from scan_registry.hardware.device import described
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.runtime import jit

Capture = pytest.CaptureFixture[str]
SM103 = Target((10, 3))
SM90 = Target((9, 0))
PROBLEM = next(s for s in FAMILY.samples if s.problem.kernel == "time_last_forward").problem


def wanted() -> tuple[Variant, Target]:
    """What a GPU of 10.3, for which nothing is built, would compile."""
    there = System(described((10, 3)), toolchains=jit.toolchains())
    winner = select(there, FAMILY, PROBLEM, "cuda").taken()
    assert winner.variant is not None
    assert winner.target == SM103
    return winner.variant, winner.target


def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*/*.scanreg"))


def only(path: Path) -> tuple[Binary, bytes]:
    held = Archive(path)
    (binary,) = held.binaries
    return binary, held.read(binary)


def add(folder: Path, path: Path, **changes: Any) -> Path:
    """One more entry: that of ``path`` with some of its fields replaced."""
    binary, content = only(path)
    key = f"{len(paths(folder)):064x}"
    Cache(folder).put(key, Archive(path).arch, (replace(binary, **changes), content))
    return folder / key[:2] / key / path.name


def run(capsys: Capture, *words: str, status: int = 0) -> str:
    assert main(["cache", *words]) == status
    return capsys.readouterr().out


def refused(capsys: Capture, *words: str) -> str:
    """The one line of an error."""
    assert main(["cache", *words]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("scan-registry: error: ")
    assert caught.err.count("\n") == 1
    return caught.err


def document(capsys: Capture, *words: str, status: int = 0) -> dict[str, Any]:
    """The JSON, after a look into its schema."""
    found: dict[str, Any] = json.loads(run(capsys, *words, "--json", status=status))
    schema = (
        files("scan_registry")
        .joinpath("schemas", f"cache-{words[0]}.json")
        .read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator(json.loads(schema)).validate(found)
    return found
