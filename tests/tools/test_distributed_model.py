"""tools/distributed_model.py and the documentation's table and picture: of the cost model, and of it alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from scan_registry.distributed.cost import (
    best_pieces,
    linear_scan_work,
    pass_seconds,
    reduce_seconds,
)
from scan_registry.distributed.machines import MACHINES

TOOL = Path(__file__).parents[2] / "tools" / "distributed_model.py"


@pytest.fixture(scope="module")
def drawn(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("docs_distributed")


def printed(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, TOOL, *words],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
        timeout=60,
    )
    return done.stdout


def test_rows_are_the_models() -> None:
    rows = json.loads(printed("--channels", "512", "--time", "100000", "--machine", "pcie", "--json"))["rows"]  # fmt: skip
    assert [row["ranks"] for row in rows[::2]] == [2**n for n in range(1, 11)]
    found = next(row for row in rows if (row["ranks"], row["direction"]) == (8, "backward"))
    work = linear_scan_work([12500] * 8, 512, 2, direction="backward")
    machine = MACHINES["pcie"]
    assert found["steps"] == 12500
    assert found["pieces"] == best_pieces(work, machine)
    assert found["reduce_ms"] == pytest.approx(1e3 * reduce_seconds(work, machine))
    assert found["pass_ms"] == pytest.approx(1e3 * pass_seconds(work, machine, found["pieces"]))
    assert found["auto"] == min(("reduce", "pass"), key=lambda each: found[f"{each}_ms"])


def test_the_table_says_that_nothing_is_measured() -> None:
    text = printed("--each", "--time", "4096", "--ranks-per-node", "2")
    assert text.startswith("modelled, not measured: H100s on NVLink; ")
    assert text.count("  4096  ") == 20


def test_the_schedule_that_is_taken_is_bold(drawn: ModuleType) -> None:
    for sequence in (drawn.WHOLE, drawn.EACH):
        rows = drawn.table_rows(sequence)
        assert [row[0] for row in rows] == [str(2**n) for n in range(1, 11)]
        for row in rows:
            assert len(row) == len(drawn.HEAD)
            for cells in (row[2:4], row[6:8]):
                (bold,) = [float(cell.strip("*")) for cell in cells if cell.startswith("**")]
                assert bold == min(float(cell.strip("*")) for cell in cells)


def test_a_gpu_cannot_hold_the_sequence_of_the_table(drawn: ModuleType) -> None:
    assert 6 * drawn.WHOLE.bytes(1) > 80e9


def test_the_picture_is_whole_and_says_what_it_is(drawn: ModuleType) -> None:
    for text in drawn.files().values():
        root = ElementTree.fromstring(text)
        width, height = (float(root.attrib[key]) for key in ("width", "height"))
        assert "modelled, not measured" in text
        for element in root.iter("{http://www.w3.org/2000/svg}text"):
            assert 0 <= float(element.attrib["x"]) <= width, element.text
            assert 0 <= float(element.attrib["y"]) <= height, element.text
        for element in root.iter("{http://www.w3.org/2000/svg}circle"):
            assert 60 <= float(element.attrib["cy"]) <= 375
