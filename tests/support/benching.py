"""``scan-registry bench`` on the CPU, on little tensors."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from scan_registry.bench import timing
from scan_registry.cli import main
from scan_registry.kernels.linear_scan.op.bench import Case

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = ("--device", "cpu", "--bs", "2", "--d_model", "8")
SMALL = Case("channel_last", 2, 8, 16, "float32")


def time_quickly(patch: pytest.MonkeyPatch) -> None:
    """A small cache to be out of, and short turns."""
    patch.setattr(timing, "cache_bytes", lambda device: 1 << 14)
    patch.setattr(timing, "LEAST_STREAMED", 1 << 16)
    patch.setattr(timing, "ENOUGH_MS", 0.2)


def schema() -> Any:
    return json.loads(
        files("scan_registry.kernels")
        .joinpath("linear_scan", "op", "bench.json")
        .read_text(encoding="utf-8")
    )


def bench(capsys: Capture, *words: str) -> str:
    assert main(["bench", *TINY, *words]) == 0
    captured = capsys.readouterr()
    assert "timing" not in captured.err  # no progress where nobody watches
    return captured.out


def document(capsys: Capture, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench(capsys, "--json", *words))
    jsonschema.Draft202012Validator(schema()).validate(found)
    return found


def refusal(capsys: Capture, *words: str) -> str:
    """What it says on stderr when it refuses, having printed nothing else."""
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err
