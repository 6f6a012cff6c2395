"""Which torch is installed, and what is printed of its tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ci.matrix import load

SAID = """torch (2.15.0)
Available versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.9.1, 2.9.0, 2.6.0
  INSTALLED: 2.9.1
"""
VERSIONS = ["2.15.0", "2.13.0+cpu", "2.13.0", "2.9.1", "2.9.0", "2.6.0"]


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> Any:
    return load_tool("torch_matrix")


def test_versions_are_read_of_pips_words(tool: Any) -> None:
    assert tool.available(SAID) == VERSIONS
    assert tool.available("ERROR: No matching distribution found for torch") == []


@pytest.mark.parametrize(
    ("release", "machine", "version"),
    [
        ("2.13", "x86_64", "2.13.0+cpu"),
        ("2.9", "x86_64", None),  # what there is was built for CUDA, and is gigabytes
        ("2.9", "aarch64", "2.9.1"),
        ("2.13", "aarch64", "2.13.0+cpu"),
        ("2.1", "aarch64", None),
        ("2.9.0", "aarch64", "2.9.0"),
    ],
)
def test_only_cpu_builds_are_installed_on_x86(
    tool: Any, release: str, machine: str, version: str | None
) -> None:
    assert tool.chosen(release, VERSIONS, machine) == version


def test_counts_are_pytests(tool: Any) -> None:
    report = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="1"/></testsuites>'
    assert tool.counts(report) == (5, 3, 1)


def test_the_table_says_what_was_not_run(tool: Any) -> None:
    rows = [
        tool.Row("2.6", why="no such build"),
        tool.Row("2.9", "2.9.1", passed=8, skipped=1, seconds=3.4),
    ]
    lines = tool.table(rows).splitlines()
    assert lines[1].split() == ["2.6", "–", "–", "–", "–", "not", "run:", "no", "such", "build"]
    assert lines[2].split() == ["2.9.1", "8", "0", "1", "3", "passed"]
    assert tool.Row("2.9", "2.9.1", passed=8, failed=1).verdict == "FAILED"
    assert tool.Row("2.9", "2.9.1").verdict == "FAILED"  # nothing was collected


@pytest.mark.parametrize(("strict", "status"), [([], 0), (["--strict"], 1)])
def test_a_release_that_is_not_there_fails_if_it_must_not(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: list[str], status: int
) -> None:
    monkeypatch.setattr(tool, "run", lambda release, *_: tool.Row(release, why="not there"))
    wheel = tmp_path / "some.whl"
    wheel.touch()
    assert tool.main([*strict, "--wheel", str(wheel)]) == status


def test_a_missing_wheel_is_refused_before_torch_is_installed(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "run", lambda *_: pytest.fail("torch was to be installed"))
    with pytest.raises(SystemExit):
        tool.main(["--wheel", "nowhere.whl"])
    assert "nowhere.whl is not a file" in capsys.readouterr().err


def test_the_releases_are_the_matrixs(tool: Any) -> None:
    matrix = load()
    assert matrix.torches == (matrix.torch[0], matrix.torch_between, matrix.torch[1])
    ordered = [tuple(map(int, each.split("."))) for each in matrix.torches]
    assert ordered == sorted(ordered)
    assert all(path.is_file() for path in tool.PUBLIC)
