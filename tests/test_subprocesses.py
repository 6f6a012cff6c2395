"""Python programs that tests start import the installed package, not the sources in the folder where pytest runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: Words that keep the working folder out of ``sys.path``, and words that put it first.
SAFE, UNSAFE = {"'-P'", "'-I'"}, {"'-c'", "'-m'"}

#: What of a command matters here.
_WORDS = re.compile("|".join(("sys.executable", *SAFE, *UNSAFE)))


def expressions(node: ast.AST) -> set[str]:
    return {ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.expr)}


def unsafe(source: str) -> Iterator[int]:
    """Lines that start ``python -c`` or ``python -m`` in pytest's working folder."""
    if "sys.executable" not in source:
        return
    tree = ast.parse(source)
    # A command may have been given a name first.
    named = {
        ast.unparse(each.targets[0]): expressions(each.value)
        for each in ast.walk(tree)
        if isinstance(each, ast.Assign) and _WORDS.search(ast.unparse(each.value))
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if not ast.unparse(node.func).startswith(("subprocess.", "captured", "forked.")):
            continue
        words = expressions(node)
        words |= {word for name in words & named.keys() for word in named[name]}
        options = {keyword.arg for keyword in node.keywords}
        starts_python = "sys.executable" in words and words & UNSAFE and not words & SAFE
        if starts_python and not options & {"cwd", None}:
            yield node.lineno


def test_python_is_started_in_another_folder() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in TESTS.rglob("*.py")
        for line in unsafe(path.read_text(encoding="utf-8"))
    }
    assert not found, found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("subprocess.run([sys.executable, '-c', script], check=True)", [1]),
        ("captured([sys.executable, '-c', script])", [1]),
        ("subprocess.run([sys.executable, *('-m', 'torch.distributed.run')])", [1]),
        ("words = [sys.executable, '-c', script]\nsubprocess.run(words)", [2]),
        ("subprocess.run([sys.executable, '-c', script], cwd=folder)", []),
        ("subprocess.run([sys.executable, '-P', '-c', script])", []),
        ("subprocess.run([sys.executable, 'tools/bench.py'])", []),
        ("subprocess.run(['git', '-c', 'user.name=x'])", []),
    ],
)
def test_what_is_unsafe(source: str, lines: list[int]) -> None:
    assert [*unsafe(source)] == lines
