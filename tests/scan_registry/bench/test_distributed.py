"""The command that times a scan over the ranks of a group."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from forked import captured

import scan_registry

SCHEMA = Path(scan_registry.__file__).parent / "schemas" / "bench-distributed.json"
#: Of one thread a process, and short timeouts: a test that hangs is one that fails.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT = 120


@pytest.mark.slow
def test_torchrun_times_all_ranks(tmp_path: Path) -> None:
    case = "channel_last:1,32,65:float32"
    done = captured(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "scan_registry", "bench", "distributed"),
            *("--device", "cpu", "--case", case, "--json"),
        ],
        env=ENVIRONMENT,
        cwd=tmp_path,  # the working folder is imported from first
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)  # of one rank: two would be no JSON
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
