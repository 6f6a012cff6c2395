"""Scripts that run Triton kernels in Triton's interpreter, each in a process of its own: the interpreter replaces
``triton.jit`` for all of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: What the scripts import beside the package.
SUPPORT = str(Path(__file__).parent)


def interpret(script: Path, *arguments: str) -> None:
    """Fails if the script does, or prints anything."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": SUPPORT},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
