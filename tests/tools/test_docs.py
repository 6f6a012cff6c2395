"""tools/docs.py: what is made of the documentation is current, and made of what it says."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"


@pytest.fixture(scope="module")
def docs(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("docs")


def test_what_is_made_is_current(docs: ModuleType) -> None:
    result = [str(path.relative_to(ROOT)) for path in docs.stale()]
    assert not result, f"{', '.join(result)}: run `python tools/docs.py`"


def test_every_command_and_option_is_on_its_page(docs: ModuleType) -> None:
    """As argparse itself knows them, by the text of ``--help``."""
    page = (PAGES / "reference" / "command-line.md").read_text(encoding="utf-8")
    for name, parser in docs._commands(docs.cli.parser()):
        assert re.search(rf"^##+ {name}$", page, re.MULTILINE), name
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", parser.format_help())) - {"--help"}
        start = page.index(f"# {name}\n")
        assert not [option for option in options if option not in page[start:]], name


def test_a_page_changes_with_its_parser(docs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser(prog="scan-registry")
    command = parser.add_subparsers().add_parser("wait", description="Waits <long> for `x`.")
    command.add_argument("--seconds", metavar="N", required=True, help="how long|short; see --all")
    monkeypatch.setattr(docs.cli, "parser", lambda: parser)
    page = docs.command_line()
    assert "## wait\n\nWaits &lt;long> for `x`.\n" in page
    assert "```text\nscan-registry wait --seconds N\n```" in page
    assert "| `--seconds N` | how long\\|short; see `--all` |" in page


def test_pictures_are_whole_and_have_both_palettes(docs: ModuleType) -> None:
    files = docs.docs_pictures.files()
    names = {name.rpartition("-")[0] for name in files}
    assert len(files) == 2 * len(names)
    for name, text in files.items():
        root = ElementTree.fromstring(text)
        width, height = (float(root.attrib[key]) for key in ("width", "height"))
        for element in root.iter("{http://www.w3.org/2000/svg}text"):
            x, y = float(element.attrib["x"]), float(element.attrib["y"])
            assert 0 <= x <= width, (name, element.text)
            assert 0 <= y <= height, (name, element.text)
            long = 0.5 * float(element.attrib["font-size"]) * len(element.text or "")
            start = x - long * {"start": 0, "middle": 0.5, "end": 1}[element.attrib["text-anchor"]]
            assert start >= -10, (name, element.text)
            assert start + long <= width + 10, (name, element.text)
        assert width == (360 if "-narrow-" in name else 760)
    palettes = docs.docs_pictures.PALETTES
    assert palettes["light"].paper in files["character-model-light.svg"]
    assert palettes["dark"].paper in files["character-model-dark.svg"]


def test_tables_are_filled_where_they_are_named(docs: ModuleType) -> None:
    text = "a\n<!-- made: targets -->\n\nold\n\n<!-- end -->\nb\n"
    with_tables = docs.docs_tables.with_tables(text)
    assert "old" not in with_tables
    assert with_tables.startswith("a\n<!-- made: targets -->\n\n| run |")
    assert with_tables.endswith("|\n\n<!-- end -->\nb\n")
    assert docs.docs_tables.with_tables(with_tables) == with_tables
    empty = "<!-- made: targets -->\n<!-- end -->\nkept\n<!-- made: targets -->\n<!-- end -->\n"
    assert "kept" in docs.docs_tables.with_tables(empty)
