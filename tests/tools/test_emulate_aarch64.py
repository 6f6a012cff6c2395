"""tools/emulate_aarch64.py: what it decides, without emulating anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def emulate(
    load_tool: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    module = load_tool("emulate_aarch64")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "WORK", tmp_path)
    return module


def test_what_it_runs_is_there(emulate: ModuleType) -> None:
    paths = [word for words, _ in emulate.RUNS.values() for word in words if isinstance(word, Path)]
    assert len(paths) >= 8
    assert [path for path in paths if not path.exists()] == []


def test_a_missing_program_is_named_with_its_package(
    emulate: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(emulate.DevError, match=r"apt-get install qemu-user-static"):
        emulate.check_tools()


def test_one_wheel_for_aarch64(emulate: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "pypi"
    folder.mkdir()
    (folder / "scan_registry-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl").touch()
    with pytest.raises(emulate.DevError, match="has not one wheel for aarch64"):
        emulate.wheel_in(tmp_path)
    wheel = folder / "scan_registry-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl"
    wheel.touch()
    assert emulate.wheel_in(tmp_path) == wheel


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("missing_aarch64.whl", "missing_aarch64.whl is not a file"),
        ("scan_registry-0.1.0-cp310-abi3-linux_x86_64.whl", "is not a wheel for aarch64"),
    ],
)
def test_a_wrong_wheel_is_refused_before_anything_is_fetched(
    emulate: ModuleType,
    name: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(emulate, "try_wheel", lambda *_: pytest.fail("the wheel was tried"))
    wheel = tmp_path / name
    if "missing" not in name:
        wheel.touch()
    assert emulate.main([str(wheel)]) == 1
    assert error in capsys.readouterr().err


def test_python_starts_itself_again_by_the_same_script(emulate: ModuleType, tmp_path: Path) -> None:
    programs = tmp_path / "root" / "usr" / "bin"
    programs.mkdir(parents=True)
    (programs / "python3.11").touch()
    (programs / "python3").symlink_to("python3.11")
    python = emulate.python_in(tmp_path, tmp_path / "root")
    text = python.read_text(encoding="utf-8")
    assert f'-0 {python} {programs / "python3.11"} "$@"' in text
    assert os.access(python, os.X_OK)
    settings = (tmp_path / "venv" / "pyvenv.cfg").read_text(encoding="utf-8")
    assert settings.startswith(f"home = {programs}\n")


def test_outcomes(emulate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statuses that are right pass, and the last line is told without its time."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho '== 3 passed in 4.56s (0:01) =='\nexit 1\n", encoding="utf-8"
    )
    python.chmod(0o755)
    for right in (0, 1):
        monkeypatch.setitem(emulate.RUNS, "import", (("-c", ""), (right,)))
        found = emulate.attempt(python, "import")
        assert (found.passed, found.last) == (right == 1, "3 passed")
    assert str(found).startswith("passed")
