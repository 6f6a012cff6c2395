"""The first sentences of docstrings, read from the sources: a table for each page of the API reference.

Nothing is imported but the package itself, so that names which need JAX are found where JAX is not installed.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import scan_registry

#: Where modules are found: the package as it is installed, or the folders of the repository that an editable install names.
_ROOTS = {
    "scan_registry.kernels": Path(__file__).resolve().parents[1] / "kernels",
    "scan_registry": Path(next(iter(scan_registry.__path__))),
}
#: Characters beyond which what follows a semicolon or a colon is left out.
_LONG = 120
_DIRECTIVE = re.compile(r"^::: (scan_registry\.[\w.]+)$", re.MULTILINE)


def summary(name: str) -> str:
    """The first sentence of what a public name's docstring says; ``LookupError`` if it says nothing."""
    parent, _, own = name.rpartition(".")
    text = ast.get_docstring(_tree(name)) or "" if _file(name) else _documentation(parent, own)
    first = re.sub(r"\s+", " ", text.split("\n\n")[0]).strip()
    sentence = re.split(r"(?<=\.) |: (?=[A-Z`])", first)[0].rstrip(":.")
    if len(sentence) > _LONG:
        sentence = sentence.split(": with ")[0].split("; ")[0]
    return sentence.replace("``", "`").replace("|", "\\|")


def names(text: str) -> list[tuple[str, str]]:
    """A row for each name that a page documents: a link to it, and its summary."""
    listed = _DIRECTIVE.findall(text)
    return [
        (f"[`{name.removeprefix('scan_registry.')}`](#{name})", summary(name))
        for name in listed
        if name != "scan_registry.distributed"  # which the page itself is about
    ]


def _file(module: str) -> Path | None:
    """The file of a module."""
    for prefix, folder in _ROOTS.items():
        if module == prefix or module.startswith(f"{prefix}."):
            stem = folder.joinpath(*module[len(prefix) :].split(".")[1:])
            for path in (stem / "__init__.py", stem.with_suffix(".py")):
                if path.is_file():
                    return path
    return None


@cache
def _tree(module: str) -> ast.Module:
    path = _file(module)
    if path is None:
        raise LookupError(f"there is no module {module}")
    return ast.parse(path.read_text(encoding="utf-8"))


def _documentation(module: str, name: str) -> str:
    """The docstring of a module, or of one of its names wherever that is defined."""
    tree = _tree(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            if text := ast.get_docstring(node):  # an overload has none
                return text
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _documentation(node.module, alias.name)
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and name in map(ast.unparse, node.targets)
        ):
            return _documentation(module, ast.unparse(node.value.func))
    raise LookupError(f"{module}.{name} has no docstring")
