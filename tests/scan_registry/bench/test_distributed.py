"""The command that times a scan over the ranks of a group."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from distributed_bench import bench_distributed
from forked import captured
from rank_pool import RankPool

import scan_registry

SCHEMA = Path(scan_registry.__file__).parent / "schemas" / "bench-distributed.json"
#: Of one thread a process, and short timeouts: a test that hangs is one that fails.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT = 120


WORDS = ["--device", "cpu", "--case", "channel_last:1,32,65:float32", "--json"]


@pytest.mark.slow
@pytest.mark.thorough  # as torchrun takes longer than what it runs, which the next test does
def test_torchrun_times_all_ranks(tmp_path: Path) -> None:
    done = captured(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "scan_registry", "bench", "distributed", *WORDS),
        ],
        env=ENVIRONMENT,
        cwd=tmp_path,  # the working folder is imported from first
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout)


def test_all_ranks_are_timed(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pool = RankPool(tmp_path, 2)
    try:
        (status, text), (other, nothing) = pool.run(2, bench_distributed, port, WORDS)
    finally:
        pool.close()  # whose processes have lost their group
    assert (status, other) == (0, 0)
    assert nothing == ""
    check(text)


def check(text: str) -> None:
    """What one rank prints: two would be no JSON."""
    document: dict[str, Any] = json.loads(text)
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["ranks"] == 2
    rows = {(timing["direction"], timing["who"]): timing for timing in document["timings"]}
    both = {"all ranks", "one rank"}
    for direction, others in (
        ("forward", {"copy", "all-gather"}),
        ("backward", set()),
        ("forward+backward", set()),
    ):
        assert {who for place, who in rows if place == direction} == both | others
        assert all(rows[direction, who]["ms"] > 0 for who in both)
    assert rows["forward", "copy"]["case"]["time"] == 65


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "tpu"], "--device is 'tpu'; accepted are cpu and cuda"),
        (["--case", "channel_last:1,4:float32"], "--case: the case is"),
        (["--case", "channel_last:1,4,9:float32:gates=channel"], "has options"),
        (["--case", "channel_last:9,99999999,99999999:float32"], "takes more memory than is free"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from scan_registry.cli import main

    assert main(["bench", "distributed", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err
