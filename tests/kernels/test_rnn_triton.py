"""The Triton kernels of recurrent networks on the CPU, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpret_rnn.py")


@pytest.mark.slow
def test_matches_the_reference() -> None:
    """In a process of its own, since the interpreter replaces ``triton.jit`` for all of a process."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
