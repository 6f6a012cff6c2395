"""Text is UTF-8 whatever the locale: nothing reads, writes or decodes in an encoding that is not named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("aot", "ci", "examples", "kernels", "scan_registry", "tests", "tools")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

_TEXTS = {"read_text", "write_text"}
#: Functions that open a file: where their mode stands, and what it is if nothing does.
_OPENERS = {
    "open": (1, "r"),
    "fdopen": (1, "r"),
    "NamedTemporaryFile": (0, "b"),
    "TemporaryFile": (0, "b"),
}
#: What stands in every source that has such a call: most have none, and need not be parsed.
_MAY_BE = re.compile(r"(_text|open|TemporaryFile)\(|\b(text|universal_newlines)=")
_MODE = re.compile(r"[rwxabt+]{1,4}")


def unnamed(source: str) -> Iterator[int]:
    """The lines of calls that leave an encoding to the locale."""
    if not _MAY_BE.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _leaves_it_open(node):
            yield node.lineno


def _leaves_it_open(call: ast.Call) -> bool:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    function = call.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    if "encoding" in named:
        return False
    if named.keys() & {"text", "universal_newlines"}:
        return True
    if isinstance(function, ast.Attribute) and name in _TEXTS:
        return True
    if (
        isinstance(function, ast.Attribute)
        and name == "open"
        and ast.unparse(function) != "io.open"
    ):
        # A path's method. Other things are opened, too, but take no mode first.
        mode = named.get("mode", call.args[0] if call.args else ast.Constant("r"))
        text = mode.value if isinstance(mode, ast.Constant) else ""
        return bool(_MODE.fullmatch(str(text))) and "b" not in str(text)
    if name not in _OPENERS:
        return False
    position, usual = _OPENERS[name]
    default = call.args[position] if len(call.args) > position else ast.Constant(usual)
    mode = named.get("mode", default)
    return not (isinstance(mode, ast.Constant) and "b" in str(mode.value))


@pytest.mark.parametrize(
    ("source", "left_open"),
    [
        ("path.read_text()", True),
        ('path.read_text(encoding="utf-8")', False),
        ("read_text(name, value)", False),  # a function of that name
        ("path.read_bytes()", False),
        ('open(name, "rb")', False),
        ('open(name, "w")', True),
        ('open(name, mode="ab")', False),
        ("path.open()", True),
        ('os.fdopen(handle, "wb")', False),
        ("os.open(path, flags)", False),
        ("zipfile.ZipFile(path).open(name)", False),
        ('NamedTemporaryFile("w")', True),
        ("subprocess.run(words, text=True)", True),
        ('subprocess.run(words, text=True, encoding="utf-8")', False),
        ("subprocess.run(words, capture_output=True)", False),
    ],
)
def test_a_call_that_leaves_its_encoding_open_is_seen(source: str, left_open: bool) -> None:
    assert list(unnamed(source)) == ([1] if left_open else [])


def test_all_folders_are_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(FOLDERS)


def test_no_call_leaves_its_encoding_to_the_locale() -> None:
    result = {
        str(path.relative_to(ROOT)): lines
        for path in FILES
        if (lines := list(unnamed(path.read_text(encoding="utf-8"))))
    }
    assert not result
