"""Variables that turn something on can also say that it is off."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import scan_registry
from scan_registry.base.environment import flag
from scan_registry.ops import values

PACKAGE = Path(scan_registry.__file__).parent


@pytest.mark.parametrize(
    ("value", "on"),
    [
        *((value, False) for value in (None, "", "0", "FALSE", "no", "Off", " 0 ")),
        *((value, True) for value in ("1", "true", "on", "yes", " ON ", "info")),
    ],
)
def test_flags(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv("SCAN_REGISTRY_LOG", raising=False)
    if value is not None:
        monkeypatch.setenv("SCAN_REGISTRY_LOG", value)
    assert flag("SCAN_REGISTRY_LOG") is on


@pytest.mark.parametrize(("value", "guess"), [("inf", "; did you mean info?"), ("2", "")])
def test_what_turns_a_flag_neither_on_nor_off(
    monkeypatch: pytest.MonkeyPatch, value: str, guess: str
) -> None:
    monkeypatch.setenv("SCAN_REGISTRY_LOG", value)
    words = f"SCAN_REGISTRY_LOG is '{value}'; accepted are info, 1, true, yes, on, 0, false, no, off{guess}"
    with pytest.raises(ValueError, match=words.replace("?", r"\?") + "$"):
        flag("SCAN_REGISTRY_LOG")


@pytest.mark.parametrize(("value", "checked"), [("0", False), ("off", False), ("1", True)])
def test_values_on_a_gpu_are_checked_where_that_is_on(
    monkeypatch: pytest.MonkeyPatch, value: str, checked: bool
) -> None:
    monkeypatch.setattr(values, "has_values", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("SCAN_REGISTRY_DEBUG", value)
    there: Any = SimpleNamespace(is_cpu=False, is_cuda=True, layout=torch.strided, is_nested=False)
    assert values.are_checked(there) is checked


def taken_as_flags(source: str) -> list[int]:
    """The lines in which a variable is on if it is set to anything at all."""
    requested: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            requested.append(node.test)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            requested.append(node.operand)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            requested += node.values
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "bool":
            requested += node.args
    return [item.lineno for item in requested if _reads(item)]


def _reads(node: ast.expr) -> bool:
    """Whether it is what a variable holds, or a text if it is not set."""
    if isinstance(node, ast.BoolOp):
        return any(map(_reads, node.values))
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv")


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('if os.environ.get("A"): pass', [1]),
        ('x = 1 if a or os.getenv("A") else 2', [1]),
        ('x = a and os.environ.get("A")', [1]),
        ('x = not os.environ.get("A")', [1]),
        ('x = bool(os.environ.get("A"))', [1]),
        ('x = os.environ.get("A") or "all"', []),
        ('if flag("A"): pass', []),
    ],
)
def test_a_variable_that_is_taken_as_a_flag_is_seen(source: str, lines: list[int]) -> None:
    assert taken_as_flags(source) == lines


def test_nothing_is_on_because_a_variable_is_set() -> None:
    sources = {p: p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py")}
    reading = {p: text for p, text in sources.items() if "environ" in text or "getenv" in text}
    assert reading
    assert {str(p): lines for p, text in reading.items() if (lines := taken_as_flags(text))} == {}
