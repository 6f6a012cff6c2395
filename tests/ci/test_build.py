"""ci/build.py: what it decides, without building anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import captured

from ci import build
from ci.matrix import Platform, load
from ci.workspace import DevError, Environment

ROOT = Path(__file__).parents[2]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [sys.executable, ROOT / "ci" / "build.py", *words], env={**os.environ, **environment}
    )


def test_it_starts_on_a_bare_python() -> None:
    """Nothing but the standard library is there before it has made its environment."""
    script = f"import runpy, sys; sys.argv = ['x', '-h']; runpy.run_path({str(ROOT / 'ci' / 'build.py')!r}, run_name='__main__')"
    done = captured([sys.executable, "-I", "-S", "-c", script])
    assert done.returncode == 0, done.stderr
    assert "python3 ci/build.py --all" in done.stdout


def test_it_asks_for_one_thing() -> None:
    assert run().returncode == 2
    assert run("--all", "--container", "sm90").returncode == 2


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (("--from", "nowhere.whl"), 1, "error: not a file: nowhere.whl"),
        (("--from", "other.whl"), 1, "error: none of the wheels is for "),
        (("--all", "--rebuild", "-1"), 2, "--rebuild: accepted are numbers from 0 on"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    words: tuple[str, ...], status: int, error: str, tmp_path: Path
) -> None:
    (tmp_path / "other.whl").touch()
    inputs = [str(tmp_path / word) if word == "other.whl" else word for word in words]
    done = run(*inputs)
    assert done.returncode == status
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_no_container_engine(tmp_path: Path) -> None:
    done = run("--container", "sm90", PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.endswith(
        "error: neither docker nor podman is installed; --all needs no container\n"
    )


def test_a_wheel_that_auditwheel_refuses(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "auditwheel").write_text("#!/bin/sh\necho too new >&2\nexit 1\n", encoding="utf-8")
    (programs / "auditwheel").chmod(0o755)
    with pytest.raises(DevError, match=r"auditwheel refuses x\.whl:\ntoo new"):
        build.repaired(Environment(tmp_path), Path("x.whl"), tmp_path / "repaired")


def test_the_second_tree_has_the_sources_and_nothing_that_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for name in (
        "aot/build.py",
        "build/x",
        "dist/y",
        "scan_registry/archives/z",
        "scan_registry/a.so",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(build, "ROOT", root)
    monkeypatch.setattr(build, "WORK", tmp_path / "work")
    for _ in range(2):  # the second time in place of the first
        tree = build.second_tree()
        files = [path.relative_to(tree) for path in tree.rglob("*") if path.is_file()]
        assert files == [Path("aot/build.py")]


def test_this_machines_wheel_is_built_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves its archives in the tree; the others' builds leave none there."""
    order = []

    def crossed(_: Environment, work: Path, platform: Platform, source: Path) -> Path:
        order.append(platform.name)
        return work / platform.name

    def native(*_: object, **options: object) -> SimpleNamespace:
        order.append("here")
        return SimpleNamespace(path=Path("here.whl"))

    monkeypatch.setattr(build.cross, "build", crossed)
    monkeypatch.setattr(build, "build_wheel", native)
    monkeypatch.setattr(build, "repaired", lambda _, wheel, folder: wheel)
    environment, clock = Environment(tmp_path), build.Clock()
    others = [item.name for item in load().platforms if item.name != os.uname().machine]
    created = build.built(environment, tmp_path, load().platforms, clock, ROOT)
    assert created == [*(tmp_path / name for name in others), Path("here.whl")]
    assert order == [*others, "here"]
    assert len(clock.steps) == len(load().platforms)
