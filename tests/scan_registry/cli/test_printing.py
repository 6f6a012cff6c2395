"""``docs/pages/reference/output`` shows what commands print. ``pytest --write-pages`` on this file writes it anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from printing import FOLDER, PAGES, alike, archives, compiled, pages


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, a_binary: Callable[..., Any]) -> dict[str, str]:
    """The text of each page."""
    folder = tmp_path_factory.mktemp("machine")
    archives(folder / "imaginary", a_binary)
    compiled(folder / "real")
    return pages({name: folder / ("real" if name == "verify" else "imaginary") for name in PAGES})


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_pages_show_what_commands_print(
    texts: dict[str, str], name: str, request: pytest.FixtureRequest
) -> None:
    path, text = FOLDER / f"{name}.txt", texts[name]
    assert "Traceback" not in text
    if request.config.getoption("--write-pages"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert alike(path.read_text(encoding="utf-8")) == alike(text), "write it anew: --write-pages"


def test_every_page_is_made() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(PAGES)


def test_only_numbers_and_widths_may_differ() -> None:
    assert alike("a  1.5 kB  2.0+cpu\n────") == alike("a 17 kB   2.1+cu130  \n──")
    assert alike("1.2e-07") == alike("3e-06")
    assert alike("passed") != alike("failed")
