"""``tools/compare.py``, on builds that print made-up times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = """
import json, sys
assert sys.argv[1:] == ["bench", "--case", "x", "--json"], sys.argv
names = {names}
case = lambda n: {{"layout": "time_last", "time": n}}
print(json.dumps({{"timings": [
    {{"case": case(n), "direction": "forward", "who": "scan-registry auto", "ms": n * {factor}}} for n in names
]}}))
"""


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("compare")


def build(folder: Path, factor: float, names: tuple[int, ...]) -> Path:
    package = folder / "scan_registry"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    program = PROGRAM.format(factor=factor, names=names)
    (package / "__main__.py").write_text(program, encoding="utf-8")
    return folder


def test_builds_are_compared_on_what_both_time(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new = build(tmp_path / "old", 1.0, (1, 2, 3)), build(tmp_path / "new", 1.5, (2, 3, 4))
    rows = tool.compare(old, new, ["bench", "--case", "x"], 2)
    assert [row.case["time"] for row in rows] == [2, 3]
    assert [len(row.old_ms) for row in rows] == [2, 2]
    assert [row.ratio for row in rows] == pytest.approx([1.5, 1.5])
    file = tmp_path / "out.json"
    words = [str(old), str(new), "--json", str(file), "--", "bench", "--case", "x"]
    monkeypatch.setattr(sys, "argv", ["compare", *words])
    assert tool.main() == 0
    assert "1.500" in capsys.readouterr().out
    assert len(file.read_text(encoding="utf-8").splitlines()) > 2


def test_a_build_that_fails_says_why(tool: ModuleType, tmp_path: Path) -> None:
    broken = tmp_path / "scan_registry"
    broken.mkdir()
    (broken / "__init__.py").write_text("", encoding="utf-8")
    (broken / "__main__.py").write_text("raise SystemExit('no GPU')", encoding="utf-8")
    with pytest.raises(SystemExit, match="printed no timings:\nno GPU"):
        tool.timings(tmp_path, ["bench"])
