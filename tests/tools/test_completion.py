"""tools/completion.py: the scripts in the package are those of the parsers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def test_scripts_are_current(load_tool: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("shtab")
    stale = [
        str(path.relative_to(ROOT))
        for path, text in load_tool("completion").scripts().items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"{', '.join(stale)}: run `python tools/completion.py`"
