"""tools/dev.py: what it decides, without building anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dev(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module; it is not in a package."""
    return load_tool("dev")


def test_the_whole_suite_runs_in_parallel(dev: ModuleType) -> None:
    assert dev.pytest_arguments([], workers=2) == ["-n", "2"]
    assert dev.pytest_arguments([], workers=64) == ["-n", "8"]


def test_a_choice_of_tests_is_passed_on(dev: ModuleType) -> None:
    assert dev.pytest_arguments(["-k", "select", "-x"], workers=2) == ["-k", "select", "-x"]


def test_sources_are_checked_under_the_import_names(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "WORK", tmp_path)
    dev.stage_sources()
    package = dev.stage_sources() / "scan_registry"  # twice: it replaces what was there
    for name, source in (
        ("dispatch/select.py", "scan_registry/dispatch/select.py"),
        ("aot/plan.py", "aot/plan.py"),
        ("kernels/model.py", "kernels/model.py"),
    ):
        assert (package / name).samefile(ROOT / source)


def test_linters_are_pinned_alike_everywhere() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    )
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert f"ruff-pre-commit\n    rev: v{pins['ruff']}\n" in hooks
    assert "tools/dev.py types" in hooks  # mypy comes from the same environment
    assert {"torch", "import-linter"} <= set(pins)
