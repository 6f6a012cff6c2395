"""Scripts that run Triton kernels in Triton's interpreter, each in a process of its own: the interpreter replaces
``triton.jit`` for all of a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from forked import captured

#: What the scripts import beside the package.
SUPPORT = str(Path(__file__).parent)


def interpret(script: Path, *arguments: str) -> None:
    """Fails if the script does, or prints anything."""
    pytest.importorskip("triton")
    ran = captured(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": SUPPORT},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
