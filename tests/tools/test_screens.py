"""tools/screens.py: what it computes beside the browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def screens(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("screens")


def test_contrast_is_that_of_wcag(screens: ModuleType) -> None:
    black, white, grey = (0, 0, 0), (255, 255, 255), (118, 118, 118)
    assert screens.contrast(black, white) == pytest.approx(21)
    assert screens.contrast(grey, white) == pytest.approx(
        4.54, abs=0.01
    )  # the palest grey that passes


def test_a_faint_text_is_named_once(screens: ModuleType) -> None:
    half_black = [0, 0, 0, 0.5]
    text = {"text": "pale", "color": half_black, "behind": [[0, 0, 0, 0]], "large": False}
    assert list(screens.faint([text, text])) == ["contrast 3.98: 'pale'"]
    assert list(screens.faint([{**text, "large": True}])) == []
    assert list(screens.faint([{**text, "color": [0, 0, 0]}])) == []


def test_links_that_lead_nowhere(screens: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "guide" / "index.html"
    page.parent.mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top">x</h1>', encoding="utf-8")
    right = '<a href="..">x</a> <a href="../#top">x</a> <a href="https://other.example/none">x</a>'
    wrong = '<a href="../#none">x</a> <img src="../none.png"> <a href="/scan-registry/none/">x</a>'
    page.write_text(right, encoding="utf-8")
    assert list(screens.dead_links(page, tmp_path)) == []
    screens._links.cache_clear()
    page.write_text(right + wrong, encoding="utf-8")
    assert list(screens.dead_links(page, tmp_path)) == [
        "link to no anchor: ../#none",
        "link to nowhere: ../none.png",
        "link to nowhere: /scan-registry/none/",
    ]
