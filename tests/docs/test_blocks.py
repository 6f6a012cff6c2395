"""What the README and the documentation show as code runs, as it stands there."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from benching import time_quickly
from pages import ROOT, RUN, SHOWN, Block, blocks, commands, documents

from scan_registry import compat
from scan_registry.aot.compile import compile_variant
from scan_registry.artifact import archive
from scan_registry.catalog import providers
from scan_registry.catalog.inventory import catalogue
from scan_registry.cli import main, selftest
from scan_registry.hardware.target import Target
from scan_registry.kernels import families

BLOCKS = [block for page in documents() for block in blocks(page)]
PROGRAM = "scan-registry"


def of_language(language: str) -> list[Block]:
    return [b for b in BLOCKS if b.language == language and b.skip is None]


def pages_with_python() -> list[Path]:
    return list(dict.fromkeys(block.page for block in of_language("python")))


def run_page(page: Path, *, gpu: bool) -> None:
    """Its Python blocks in their order, in one namespace, as a reader would type them. The test counts as skipped
    where blocks are left out because a package is not installed."""
    names: dict[str, Any] = {"__name__": "__page__"}
    entries = [b for b in of_language("python") if b.page == page and (gpu or b.gpu is None)]
    missing = {b.needs for b in entries if b.needs and importlib.util.find_spec(b.needs) is None}
    for block in entries:
        if block.needs not in missing:
            # As many empty lines as stand before it, so that a traceback names the page's line.
            code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
            exec(code, names)
    if missing:
        pytest.skip(f"blocks that need {', '.join(sorted(filter(None, missing)))} were left out")


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    """A page may show ``install``; other tests look for the originals."""
    yield
    compat.uninstall()


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def slow(page: Path) -> list[pytest.MarkDecorator]:
    entries = [b for b in of_language("python") if b.page == page and b.gpu is None]
    return [pytest.mark.slow] if any(block.slow for block in entries) else []


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=named(p), marks=slow(p)) for p in pages_with_python()]
)
def test_python_runs_on_the_cpu(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if any("torch.compile(" in b.text for b in of_language("python") if b.page == page):
        from torch._inductor import config

        # C++ that inductor generates is torch's own matter, and takes a compiler most of the test's time.
        with config.patch(compile_threads=1, fallback_by_default=True):
            run_page(page, gpu=False)
    else:
        run_page(page, gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [pytest.param(p, id=named(p)) for p in pages_with_python()])
def test_python_runs_on_a_gpu(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page, gpu=True)


def marks_of(block: Block) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.gpu] if block.gpu is not None else []
    return [*marks, pytest.mark.slow] if block.slow else marks


def with_sm90(folder: Path) -> tuple[tuple[providers.Provider, ...], Any]:
    """What is installed; and where that has no archive for sm90, one in ``folder`` of a kernel that a page compiles again."""
    (own, *others), problems = providers.installed()
    target = Target.parse("sm90")
    if target in [each.arch for each in own.archives]:
        return (own, *others), problems
    variants = families()["linear_scan"].kernel("time_last_reduction", "cuda").variants
    entries = [
        compile_variant(v, target) for v in variants if v.text("dtype") in ("float32", "bfloat16")
    ]
    path = folder / "archives" / f"{target.label}{archive.SUFFIX}"
    archive.write(path, target, entries, {"version": own.version})
    return (own, *others, providers.Provider(own.name, own.version, folder, own.core, {})), problems


@pytest.fixture(scope="module")
def program(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[tuple[str, ...]], tuple[int, str]]]:
    """Calls the program, and returns its status and what it has printed. Of what several pages show the answer is kept."""
    folder = tmp_path_factory.mktemp("commands")
    installed = with_sm90(folder)

    @cache
    def call(words: tuple[str, ...]) -> tuple[int, str]:
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(StringIO()) as said,
            redirect_stderr(said),
        ):
            patch.chdir(folder)
            patch.setenv("SCAN_REGISTRY_CACHE", str(folder / "cache"))
            patch.setenv("SCAN_REGISTRY_JOBS", "1")  # others would be forks of this process
            patch.setattr(selftest, "_MOST_ON_CPU", 8000)
            time_quickly(patch)
            # Whose archives are then read once.
            patch.setattr(providers, "installed", lambda: installed)
            return main(words), said.getvalue()

    catalogue.cache_clear()
    yield call
    catalogue.cache_clear()


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.name, marks=marks_of(b)) for b in of_language("shell")]
)
def test_commands_run(block: Block, program: Callable[[tuple[str, ...]], tuple[int, str]]) -> None:
    """They end with the status that the page states, or with 0."""
    for command in commands(block):
        words = shlex.split(command, comments=True)
        assert words[0] == PROGRAM, f"{block.name}: only {PROGRAM} runs; say `skip` and why"
        status, said = program(tuple(words[1:]))
        assert status in block.exits, f"{command}\n{said}"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_runs_or_says_why_not(block: Block) -> None:
    assert block.language in (*RUN, *SHOWN), f"{block.name}: {block.language!r}"
    assert block.skip != "", f"{block.name}: skip needs a reason"
    assert block.gpu != "", f"{block.name}: gpu needs a reason"
    assert block.needs != "", f"{block.name}: needs what?"


def test_code_is_in_fences(tmp_path: Path) -> None:
    """Indented code would not be found, and so not run."""
    for page in documents():
        lines = page.read_text(encoding="utf-8").splitlines()
        fenced = False
        for number, line in enumerate(lines):
            if line.startswith("```"):
                fenced = not fenced
            starts = line.startswith("    ") and number > 1 and not lines[number - 1].strip()
            within = any(  # an item of a list, or an admonition
                before.lstrip().startswith(("-", "1.", "2.", "3.", "4.", "5.", "!!!", "???", ":"))
                for before in lines[max(0, number - 12) : number]
                if before.strip()
            )
            assert fenced or not starts or within, f"{page}:{number + 1}: {line}"
