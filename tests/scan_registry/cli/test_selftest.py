"""``scan-registry selftest`` on the CPU: which rows it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from scan_registry.cli import main
from scan_registry.cli import selftest as command
from scan_registry.kernels.linear_scan.cases import TOLERANCE

Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_dtype(dtype: str, capsys: Capture) -> None:
    """Each passes on the CPU."""
    assert main(["selftest", "--device", "cpu", "--dtype", dtype, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"]
    assert {result["dtype"] for result in document["results"]} == {dtype}
    kernels = [result["kernel"] for result in document["results"]]
    assert len(kernels) == len(set(kernels)) == 6
    assert all(result["cases"] > 0 for result in document["results"])


def test_an_error_beyond_its_tolerance(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLERANCE, "float32", 1e-12)
    assert main(["selftest", "--device", "cpu", "--dtype", "float32"]) == 1
    printed = capsys.readouterr().out
    assert "failed" in printed
    assert "0 passed" in printed


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--dtype", "int8"], "int8"), (["--device", "tpu"], "tpu"), (["--device", "cuda:99"], "99")],
)
def test_what_it_refuses(words: list[str], named: str, capsys: Capture) -> None:
    assert main(["selftest", *words]) == 2
    printed = capsys.readouterr().err
    assert named in printed
    assert "accepted" in printed


def test_rows_pass_or_say_why_not() -> None:
    row = {"family": "f", "kernel": "k", "language": "cuda", "dtype": "float32", "tier": "exact"}
    whole = {**row, "variants": (), "cases": 1, "error": 1e-7, "tolerance": 1e-6}
    assert command.Result(**whole).passed
    assert not command.Result(**{**whole, "error": 1e-5}).passed
    assert not command.Result(**{**whole, "error": float("nan")}).passed
    assert not command.Result(**{**whole, "error": None, "failure": "no kernel"}).passed
