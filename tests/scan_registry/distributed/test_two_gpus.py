"""Over NCCL and two GPUs a scan gives what one GPU gives over the whole sequence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from processes import captured

RANKS = Path(__file__).parents[2] / "support" / "nccl_ranks.py"


@pytest.mark.gpu
@pytest.mark.slow
def test_results_are_one_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = captured(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            RANKS,
        ],
        cwd=tmp_path,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right ") == 18
    assert "WRONG" not in done.stdout
