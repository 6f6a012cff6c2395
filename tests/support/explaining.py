"""What ``explain`` is asked on imaginary systems, and parts of what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.cli import main
from scan_registry.diagnostics.explanation import Explanation, explain_for
from scan_registry.dispatch.select import System
from scan_registry.hardware.device import Device
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.tuning import Row, Tuning

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]
Capture = pytest.CaptureFixture[str]
SCHEMA = json.loads(
    files("scan_registry").joinpath("schemas", "explain.json").read_text(encoding="utf-8")
)
CALL = ("explain", "linear_scan", "--dtype", "bf16", "--shape", "2,8,4096")


def valid(document: Mapping[str, Any]) -> None:
    Draft202012Validator(SCHEMA).validate(document)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def explained(there: System, *shape: int, **options: Any) -> Explanation:
    tensor = meta(*(shape or (2, 8, 4096)))
    return explain_for(there, "linear_scan", tensor, tensor, **options)


def facts(text: str, step: str) -> dict[str, str]:
    """The labelled lines of one step."""
    (block,) = [block for block in text.split("\n\n") if block.startswith(f"{step}: ")]
    lines = [line for line in block.splitlines()[1:] if not line.startswith("    ")]
    return {line[2:].partition(" ")[0]: line[13:] for line in lines}


def a_row(there: System, arch: str, named: bool = True) -> Tuning:
    """Of the forward kernel, at four times the time; names what the spec likes the least."""
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    decision = explained(there).steps[0].decision
    assert kernel.tunable.shape is not None
    shape = kernel.tunable.shape(decision.problem)
    taken = [v for v in kernel.variants if kernel.rules.accepts(v, decision.problem) is None]
    least = max(taken, key=lambda v: kernel.cost(v, decision.problem))
    times = {kernel.label(least) if named else "gone=1": 0.25}
    row = Row({**shape.sizes, "time": 4 * shape.sizes["time"]}, times)
    return Tuning.of(arch, "Imaginary T", "2026-02-01", {shape.kind: [row]})


def document(capsys: Capture, *words: str, status: int = 0) -> dict[str, Any]:
    """What the command prints as JSON, which its schema describes."""
    assert main([*CALL, *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    valid(found)
    return found
