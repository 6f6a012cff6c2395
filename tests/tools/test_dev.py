"""tools/dev.py: what it decides, without building anything."""

from __future__ import annotations

import os
import re
import sys
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
    assert dev.pytest_arguments([], 2, thorough=False)[:2] == ["-n", "2"]
    assert dev.pytest_arguments([], 64, thorough=True)[:3] == ["--thorough", "-n", "8"]
    words = ["-k", "select", "-x"]
    assert dev.pytest_arguments(words, 2, thorough=False) == words


def test_modules_are_compiled_once_whatever_the_shell_says(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(dev, "WORK", tmp_path)
    monkeypatch.setattr(dev, "types", lambda: int("PYTHONDONTWRITEBYTECODE" in os.environ))
    monkeypatch.setattr(sys, "argv", ["dev.py", "types"])
    assert dev.main() == 0


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


def test_compilers_are_installed_beside_the_checks_of_sources(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All packages in two steps, of which the second changes nothing that the first has installed."""
    commands: list[list[str]] = []
    monkeypatch.setattr(dev, "require", lambda _, words: commands.append([*map(str, words)]))
    dev.install_tools(dev.Environment(tmp_path))
    dev.install_compilers(dev.Environment(tmp_path))
    first, second = ({*words} & {*dev.for_tests()} for words in commands)
    assert first | second == {*dev.for_tests()}
    assert not first & second
    for words, named in zip(commands, (dev.CONSTRAINTS, dev.REQUIREMENTS), strict=True):
        assert words[words.index(str(named)) - 1] == "-r"
    for words, named in zip(commands, (dev.REQUIREMENTS, dev.CONSTRAINTS), strict=True):
        assert words[words.index(str(named)) - 1] == "--constraint"
    if dev.for_tests():  # which an older Python cannot read
        names = {package.partition("==")[0] for package in second}
        assert names == {"nvidia-cuda-nvrtc-cu12", "triton"}


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


def test_the_site_is_built_strictly_and_fails_the_checks(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: dict[str, list[str]] = {}

    def run(title: str, command: list[object], **_: object) -> int:
        commands[title] = [str(word) for word in command]
        return int(title == "the documentation")

    monkeypatch.setattr(dev, "run", run)
    monkeypatch.setattr(dev, "check_types", lambda _: 0)
    monkeypatch.setattr(dev, "check_imports", lambda _: 0)
    monkeypatch.setattr(dev, "report_attestations", lambda _: None)
    program = tmp_path / "bin" / "pytest"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    program.chmod(0o755)
    assert dev.check_sources(dev.Environment(tmp_path)) == ["the documentation"]
    monkeypatch.setattr(dev, "of_last_test", lambda: dev.Environment(tmp_path))
    assert dev.sources() == 1
    assert dev.check_installed(dev.Environment(tmp_path), ["--version"], False) == 0
    words = commands["the documentation"][1:]
    assert words == ["-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "docs" / "mkdocs.yml")]


@pytest.mark.parametrize("status", [0, 3])
def test_what_runs_beside_is_shown_whole_if_it_fails(
    dev: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
) -> None:
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "WORK", tmp_path)
    script = f"print('all of it'); print('--- a step: 1 s'); raise SystemExit({status})"
    with dev.beside([sys.executable, "-c", script]) as end:
        assert end() == status
    said = capsys.readouterr().out.partition("SystemExit")[2]
    assert "--- a step: 1 s" in said
    assert ("all of it\n" in said) == bool(status)


def test_the_site_fails_on_a_link_that_leads_nowhere(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By mkdocs itself, as strictly as the site's settings are, on pages of the test's own."""
    pytest.importorskip("mkdocs")
    settings = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    validation = re.search(r"^validation:\n(?:  .*\n)+", settings, re.MULTILINE)
    assert validation is not None
    environment = dev.Environment(Path(sys.executable).parents[1])
    for link, status in (("index.md#there", 0), ("index.md#nowhere", 1), ("none.md", 1)):
        folder = tmp_path / link
        (folder / "pages").mkdir(parents=True)
        text = f"# There\n\n[a link]({link})\n"
        (folder / "pages" / "index.md").write_text(text, encoding="utf-8")
        text = f"site_name: x\ndocs_dir: pages\n{validation[0]}"
        (folder / "mkdocs.yml").write_text(text, encoding="utf-8")
        monkeypatch.setattr(dev, "SITE", folder / "mkdocs.yml")
        monkeypatch.setattr(dev, "WORK", tmp_path)  # as mypy may read what is staged in the other
        assert dev.build_site(environment) == status, link


def test_what_builds_the_site_is_pinned() -> None:
    lines = (ROOT / "docs" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert all("==" in line for line in lines if not line.startswith("#"))
