"""The scripts in ``tests/stress``: what they decide, without their long runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from by_path import load

STRESS = Path(__file__).parents[1] / "stress"


def test_each_says_how_to_start_it() -> None:
    for path in STRESS.glob("*.py"):
        assert f" tests/stress/{path.name}" in path.read_text(encoding="utf-8").split('"""')[1]
        assert not path.name.startswith("test_")  # pytest would collect it


@pytest.fixture(scope="module")
def race() -> Any:
    return load(STRESS / "race.py")


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 1), pytest.param("cuda", 5, marks=pytest.mark.gpu)])  # fmt: skip
def test_threads_do_not_disturb_one_another(race: Any, device: str, seconds: int) -> None:
    done = race.run(seconds, 4, device)
    assert done.problems == []
    assert done.rounds


@pytest.mark.slow
def test_differences_and_errors_are_seen(race: Any) -> None:
    wrong = race.make_race(1, "cpu")
    wrong.expected[0][5][1] += 1
    threading.Timer(0.5, wrong.stop.set).start()
    race.run_thread(wrong, 0, None)
    assert wrong.problems[0] == "thread 0, job 5: 1 off"
    wrong = race.make_race(1, "cpu")
    wrong.jobs[2] = lambda x: torch.zeros(2) @ torch.zeros(3)
    race.run_thread(wrong, 0, None)
    (problem,) = wrong.problems
    assert problem.startswith("thread 0: RuntimeError")


VERSIONS = ["2.15.0", "2.13.0+cpu", "2.13.0", "2.9.1", "2.9.0", "2.6.0"]


@pytest.fixture(scope="module")
def matrix() -> Any:
    return load(STRESS / "torch_matrix.py")


def test_versions_are_read_of_pips_words(matrix: Any) -> None:
    said = f"torch (2.15.0)\nAvailable versions: {', '.join(VERSIONS)}\n  INSTALLED: 2.9.1\n"
    assert matrix.available(said) == VERSIONS
    assert matrix.available("ERROR: No matching distribution found for torch") == []


@pytest.mark.parametrize(
    ("release", "machine", "version"),
    [
        ("2.13", "x86_64", "2.13.0+cpu"),
        ("2.9", "x86_64", None),  # what there is was built for CUDA, and is gigabytes
        ("2.9", "aarch64", "2.9.1"),
        ("2.1", "aarch64", None),
    ],
)
def test_only_cpu_builds_are_installed_on_x86(
    matrix: Any, release: str, machine: str, version: str | None
) -> None:
    assert matrix.chosen(release, VERSIONS, machine) == version


@pytest.mark.parametrize(("strict", "status"), [([], 0), (["--strict"], 1)])
def test_a_release_that_is_not_there_fails_if_it_must_not(
    matrix: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: list[str], status: int
) -> None:
    monkeypatch.setattr(matrix, "run", lambda *_: (matrix.NOT_RUN, "not there"))
    wheel = tmp_path / "some.whl"
    wheel.touch()
    assert matrix.main([*strict, "--wheel", str(wheel)]) == status


@pytest.fixture
def emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load(STRESS / "aarch64.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "WORK", tmp_path)
    return module


def test_what_is_emulated_is_there(emulation: Any) -> None:
    paths = [word for words in emulation.RUNS.values() for word in words if isinstance(word, Path)]
    assert len(paths) >= 8
    assert [path for path in paths if not path.exists()] == []


def test_a_missing_program_is_named_with_its_package(
    emulation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(emulation.DevError, match=r"apt-get install qemu-user-static"):
        emulation.try_wheel(tmp_path, [], False)


def test_one_wheel_for_aarch64(emulation: Any, tmp_path: Path) -> None:
    folder = tmp_path / "dist" / "pypi"
    folder.mkdir(parents=True)
    other = folder / "scan_registry-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"
    other.touch()
    with pytest.raises(emulation.DevError, match="has not one wheel for aarch64"):
        emulation.chosen(None)
    wheel = folder / "scan_registry-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl"
    wheel.touch()
    assert emulation.chosen(None) == wheel
    for wrong in (other, folder / "missing_aarch64.whl"):
        with pytest.raises(emulation.DevError, match="is no file with a wheel for aarch64"):
            emulation.chosen(wrong)


def test_python_starts_itself_again_by_the_same_script(emulation: Any, tmp_path: Path) -> None:
    programs = tmp_path / "root" / "usr" / "bin"
    programs.mkdir(parents=True)
    (programs / "python3.11").touch()
    (programs / "python3").symlink_to("python3.11")
    python, version = emulation.python_in(tmp_path)
    assert version == "3.11"
    text = python.read_text(encoding="utf-8")
    assert f'-0 {python} {programs / "python3.11"} "$@"' in text
    assert os.access(python, os.X_OK)
