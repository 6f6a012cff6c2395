"""tools/host_time.py, for a call or two of each kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SCRIPT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import host_time
host_time.ROUNDS, host_time.CALLS = 1, 2
host_time.main()
"""


@pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__")
    or not hasattr(torch._C._dynamo.guards, "_empty_strided_cpu"),
    reason="this torch lacks what the fast path is made of",
)
def test_every_row_is_timed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(TOOLS), "scan", "rnn"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("µs")]
    assert len(rows) == 11 + 3 * 6
    assert {" ".join(row[:-6]) for row in rows[:11]} >= {"plain", "both, reverse", "packed, both"}
    for row in rows[11:]:
        composed, short = (int(each) for each in row[-2:])
        if row[1:3] == ["both", "ways"]:
            assert short == composed
        else:
            assert short < composed / 2
