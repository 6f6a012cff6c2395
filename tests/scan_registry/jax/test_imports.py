"""What is for JAX imports no torch, and nothing else imports JAX."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import scan_registry
import scan_registry.kernels

PACKAGE = Path(scan_registry.__file__).parent


def imported(path: Path) -> Iterator[str]:
    """The packages that a module imports anywhere, but for those of this one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_modules_import_one_of_both() -> None:
    sources = [*PACKAGE.rglob("*.py"), *scan_registry.kernels.ROOT.rglob("*.py")]
    for_jax = {path for path in sources if path.stem.startswith("jax") or path.parent.name == "jax"}
    assert len(for_jax) > 3
    for path in sources:
        assert ("torch" if path in for_jax else "jax") not in imported(path), path


def test_a_call_imports_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    script = """
import sys
import scan_registry
assert "jax" not in sys.modules
from scan_registry.jax import linear_scan
import jax.numpy as jnp
linear_scan(jnp.ones((2, 8)), jnp.ones((2, 8))).block_until_ready()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
