"""``tools/selective_scan_ranks.py``: the time of one selective scan over ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "selective_scan_ranks.py"


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    return subprocess.run(
        [*command, str(TOOL), "--device", "cpu", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--shape", "2,8,64", "--softplus", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    head, one, line = done.stdout.splitlines()
    assert head == "2 ranks, cpu, 2,8,64, milliseconds"
    assert one.startswith("one rank: forward ")
    assert line.startswith("all ranks: forward ")
    error = re.search(r"error (\S+)$", line)
    assert error is not None
    assert float(error[1]) < 1e-6


@pytest.mark.parametrize("shape", ["2,8,63", "2,8", "2,x,64", "2,0,64"])
def test_a_wrong_shape_is_refused(
    shape: str,
    load_tool: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        load_tool("selective_scan_ranks").main(["--shape", shape, "--device", "cpu"])
    wanted = f"--shape is {shape}; expected three sizes, and a time that 2 divides"
    assert wanted in capsys.readouterr().err
