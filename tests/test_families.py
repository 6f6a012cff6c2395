"""A family of kernels is one folder and its operator: what else there is names none.

Identifiers and strings are read; comments and docstrings may give examples.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import scan_registry
from scan_registry import distributed
from scan_registry.kernels import operators, public

ROOT = Path(__file__).resolve().parents[1]

#: Where modules and stand-ins are, which are of families.
HOMES = tuple(ROOT / "scan_registry" / name for name in ("nn", "compat"))
#: Tools that work on every family; others are programs for people who work on one.
TOOLS = ("attest.py", "tune.py", "dev.py", "compare.py", "records.py", "sanitize.py")
#: What names families all the same, and why.
ALLOWED = {
    "scan_registry/__init__.py": "the public names, which readers and type checkers look for there",
    "scan_registry/bench/distributed.py": "times linear_scan over ranks",
    "scan_registry/distributed/__init__.py": "its public names, as in ``scan_registry/__init__.py``",
    "scan_registry/distributed/reduce.py": "composes the summaries of many ranks by one linear_scan",
    "scan_registry/jax/__init__.py": "its public names, as in ``scan_registry/__init__.py``",
    "scan_registry/diagnostics/first_calls.py": "says which call was timed",
    "ci/environments.py": "calls public functions of an installed release, as its users do",
}


def modules() -> Iterator[Path]:
    """Every module that is to name no family."""
    for folder in ("scan_registry", "aot", "ci"):
        yield from (ROOT / folder).rglob("*.py")
    yield from (ROOT / "kernels").glob("*.py")
    yield from (ROOT / "tools" / name for name in TOOLS)


def words(source: str) -> Iterator[str]:
    """Its identifiers and strings."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)
        for field in ("id", "attr", "name", "asname", "arg", "module"):
            yield str(getattr(node, field, ""))


def named(source: str) -> set[str]:
    """Families that it names, however they are spelt: ``LinearScanProblem`` names linear_scan."""
    plain = [word.lower().replace("_", "") for word in words(source)]
    return {name for name in operators() if any(name.replace("_", "") in word for word in plain)}


def test_no_module_names_a_family_but_its_own() -> None:
    found = {
        str(path.relative_to(ROOT)): families
        for path in modules()
        if not any(home in path.parents for home in HOMES)
        if (families := named(path.read_text(encoding="utf-8")))
    }
    assert found.keys() - ALLOWED.keys() == set(), found
    assert found.keys() == ALLOWED.keys()  # no exception outlives its reason


def test_lists_of_public_names_are_those_of_the_families() -> None:
    """Type checkers read the lists of the packages, and a name is loaded by the description of its family."""
    assert {*public()} <= {*scan_registry.__all__}
    assert {*public("DISTRIBUTED")} == {*distributed.__all__}
    for_jax = pytest.importorskip("scan_registry.jax")
    assert {*public("JAX")} == {*for_jax.__all__}


@pytest.mark.parametrize(
    ("source", "families"),
    [
        ("import scan_registry.kernels.rnn.spec", {"rnn"}),
        ("from scan_registry.kernels import linear_scan as scan", {"linear_scan"}),
        ("class LinearScanProblem: ...", {"linear_scan"}),
        ("def _of_rnn(): ...", {"rnn"}),
        ("f(kind='rnn')", {"rnn"}),
        ('"""Such as rnn."""', set()),
        ('def f():\n    """Such as rnn."""\n    return 1  # of rnn', set()),
    ],
)
def test_what_names_a_family(source: str, families: set[str]) -> None:
    assert named(source) == families
