"""``tools/records.py``: JSON with a line for each record, and that published files have this form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = (*ROOT.glob("tools/results/*.json"), *ROOT.glob("kernels/*/attestations/*.json"))


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("records")


def test_a_record_has_a_line_and_what_holds_records_has_several(tool: ModuleType) -> None:
    document = {
        "gpu": "a GPU",
        "shape": [1, 2],
        "empty": {},
        "results": [{"name": "x", "runs": [{"ms": 1.5}, {"ms": 2}]}, {"name": "y", "runs": []}],
    }
    assert tool.text(document) == (
        '{\n "gpu": "a GPU",\n "shape": [1, 2],\n "empty": {},\n "results": [\n'
        '  {\n   "name": "x",\n   "runs": [\n    {"ms": 1.5},\n    {"ms": 2}\n   ]\n  },\n'
        '  {"name": "y", "runs": []}\n ]\n}\n'
    )
    assert json.loads(tool.text(document)) == document


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}/{path.name}")
def test_published_files(tool: ModuleType, path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    assert tool.text(json.loads(content)) == content, f"python tools/records.py {path}"
