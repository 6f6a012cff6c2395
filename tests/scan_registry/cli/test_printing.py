"""``docs/pages/reference/output`` shows what commands print. ``pytest --write-pages`` on this file writes it anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from printing import FOLDER, PAGES, WIDTHS, alike, archives, compiled, pages, parts_of

from scan_registry.cli import tables
from scan_registry.cli.tables import folded, new_table, say, screen


@pytest.fixture(scope="module")
def widths(pytestconfig: pytest.Config) -> tuple[int | None, ...]:
    """A narrow terminal and a pipe, unless pages are written or all is to be compared."""
    whole = any(map(pytestconfig.getoption, ("--thorough", "--write-pages")))
    return WIDTHS if whole else (WIDTHS[0], None)


@pytest.fixture(scope="module")
def texts(
    tmp_path_factory: pytest.TempPathFactory,
    a_binary: Callable[..., Any],
    widths: tuple[int | None, ...],
) -> dict[str, str]:
    """The text of each page."""
    folder = tmp_path_factory.mktemp("machine")
    archives(folder / "imaginary", a_binary)
    compiled(folder / "real")
    folders = {name: folder / ("real" if name == "verify" else "imaginary") for name in PAGES}
    return pages(folders, widths)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_pages_show_what_commands_print(
    texts: dict[str, str],
    name: str,
    request: pytest.FixtureRequest,
    widths: tuple[int | None, ...],
) -> None:
    path, text = FOLDER / f"{name}.txt", texts[name]
    assert "Traceback" not in text
    if request.config.getoption("--write-pages"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    recorded = parts_of(path.read_text(encoding="utf-8"), widths)
    assert alike(recorded) == alike(text), "write it anew: --write-pages"


def test_every_page_is_made() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_no_line_is_wider_than_its_terminal(name: str) -> None:
    width = 0
    for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("$ "):
            stated = re.search(r"# on a terminal of (\d+) columns$", line)
            width = int(stated[1]) if stated else 100_000
        else:
            assert len(line) <= width, line


def test_text_is_folded_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"note: {'compiled from PTX, ' * 20}\n  launch     {'grid 132 :1: [x] ' * 20}".rstrip()
    monkeypatch.setenv("COLUMNS", "80")
    say(screen(), text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr(tables, "on_terminal", lambda: True)
    say(screen(), text)
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.split() == text.split()


def test_what_is_folded_continues_below_its_text() -> None:
    assert folded("short", 80) == ["short"]
    assert folded("cache      one two three", 22) == ["cache      one two", "           three"]
    assert folded("  → one two three", 12) == ["  → one two", "    three"]
    assert folded("  one two three", 12) == ["  one two", "    three"]
    assert folded("one two three", 8) == ["one two", "three"]


def test_columns_that_stay_are_closer_together_and_then_cut() -> None:
    table = new_table("kernel", "tier!", "size?")
    table.add_row("forward", "exact", "10 kB")

    def lines(width: int) -> list[str]:
        return [line.plain for line in table.lines(width)[0]]

    assert lines(14) == ["kernel   tier", "─" * 14, "forward  exact"]
    assert lines(13) == ["kernel  tier", "─" * 13, "forward exact"]
    assert lines(11) == ["kernel  ti…", "─" * 11, "forward ex…"]


def test_only_numbers_and_widths_may_differ() -> None:
    assert alike("a  1.5 kB  2.0+cpu\n────") == alike("a 17 kB   2.1+cu130  \n──")
    assert alike("1.2e-07") == alike("3e-06")
    assert alike("passed") != alike("failed")
