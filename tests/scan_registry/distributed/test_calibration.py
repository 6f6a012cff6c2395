"""What is measured of a group, in two processes, and the command that times both schedules on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import scan_registry

SCHEMA = Path(scan_registry.__file__).parent / "schemas" / "bench-distributed.json"
#: Of one thread a process, and short timeouts: a test that hangs is one that fails.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT = 120

MEASURE = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from scan_registry import distributed
from scan_registry.distributed.machines import default
from scan_registry.distributed.calibration import machine_of

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
cpu, world = torch.device("cpu"), dist.group.WORLD
assert machine_of(world, cpu) == default("cpu")
found = distributed.measure()
assert machine_of(world, cpu) is found
held = [None, None]
dist.all_gather_object(held, found)
assert held[0] == held[1], held
assert found.memory > 1e8 and found.link > 1e6 and found.piece >= found.launch > 0
assert 0 < found.all_gather(2, 0) < 1
assert "measured" in found.source and found.ranks_per_node == 2
# A group of its own is not measured with the first.
assert machine_of(dist.new_group(), cpu) == default("cpu")
dist.barrier()  # A rank that left now would cut off another that is still connecting.
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_measure_the_same(tmp_path: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURE, str(rank), str(tmp_path / "store")],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    try:
        for process in running:
            _, said = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, said
    finally:
        for process in running:
            process.kill()


@pytest.mark.slow
def test_torchrun_times_both_schedules(tmp_path: Path) -> None:
    case = "channel_last:1,32,65:float32"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "scan_registry", "bench", "distributed"),
            *("--device", "cpu", "--case", case, "--json"),
        ],
        env=ENVIRONMENT,
        cwd=tmp_path,  # the working folder is imported from first
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)  # of one rank: two would be no JSON
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["ranks"] == 2
    rows = {(each["direction"], each["who"]): each for each in document["timings"]}
    assert {who for direction, who in rows if direction == "forward"} == {
        *("copy", "all-gather", "reduce", "pass", "one rank")
    }
    for direction in ("forward", "backward", "forward+backward"):
        for who in ("reduce", "pass", "one rank"):
            assert rows[direction, who]["predicted_ms"] > 0
        assert rows[direction, "pass"]["pieces"] == 1  # 32 float32 are one line of memory
        assert rows[direction, "reduce"]["chosen"] != rows[direction, "pass"]["chosen"]
    predicted = {who: rows["forward", who]["predicted_ms"] for who in ("reduce", "pass")}
    shorter = min(predicted, key=lambda who: predicted[who])
    assert rows["forward", shorter]["chosen"]
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
