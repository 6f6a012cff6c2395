"""``examples/train_sequence_parallel.py``: over ranks that share sequences, training is that of one process."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sequence_parallel_ranks as program
import torch
from processes import captured
from rank_pool import RankPool
from torch.torch_version import TorchVersion

pytestmark = pytest.mark.slow
#: Ranks, and what differs from two ranks that share each sequence, in float64.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 along time": (2, {"steps": 6}),
    "2 along time, for longer": (2, {}),
    "2 along time, float32": (2, {"dtype": "float32", "steps": 3}),
    "2 along time, bfloat16": (2, {"dtype": "bfloat16", "steps": 3}),
    "2 along time, compiled": (2, {"compile": "eager", "steps": 2}),
    "2 of data, 2 along time": (4, {"time_ranks": 2, "steps": 2}),
    "2 of data, 2 along time, replicas, checkpointing": (
        *(4, {"time_ranks": 2, "replicate": True, "checkpoint": True, "steps": 2}),
    ),
    "4 along time": (4, {"steps": 2}),
}
#: Of which others have all, or other tests: these compile calls over ranks, without FSDP2.
THOROUGH = {
    "2 along time, for longer",
    "2 along time, compiled",
    "2 of data, 2 along time",
    "4 along time",
}


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankPool]]:
    """All ranks of a pool take part in a training."""
    found = {size: RankPool(tmp_path_factory.mktemp("ranks"), size) for size in (2, 4)}
    yield found
    for pool in found.values():
        pool.close()


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.thorough if case in THOROUGH else ()) for case in CASES],
)
def test_training_is_that_of_one_process(pools: dict[int, RankPool], case: str) -> None:
    ranks, given = CASES[case]
    if "dtype" in given and torch.__version__ < TorchVersion("2.13"):
        pytest.skip(
            "with float32 gradients, FSDP2 needs means, which gloo of older torch may not compute"
        )
    first, *others = pools[ranks].run(ranks, program.compare, given)
    tolerance = program.tool().TOLERANCE[given.get("dtype", "float64")]
    for record in (first, *others):
        assert max(record["apart"].values()) <= tolerance, record["apart"]
        assert record["ranks"] == first["ranks"]
    losses = [loss for loss, _ in first["ranks"]]
    assert len(losses) == given.get("steps", 20)
    less = {20: 1, 6: 0.2}.get(len(losses))
    assert losses[-1] < losses[0] - less if less else losses[-1] != losses[0]


@pytest.mark.parametrize(("mistake", "wrong"), [("scale", "norm"), ("group", "loss")])
def test_mistakes_are_seen(pools: dict[int, RankPool], mistake: str, wrong: str) -> None:
    for record in pools[2].run(2, program.compare_mistake, mistake):
        assert record["apart"][wrong] > 1e-6


def test_the_program(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Its exit status is 1 on the second rank, which accepts no difference at all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--dtype", "float64", "--steps", "2", "--json", str(path)]
    try:
        first, second = pools[2].run(2, program.main, port, arguments)
    finally:
        pools[2].close()  # whose processes have lost their group
    assert (first[0], second[0]) == (0, 1)
    assert second[1] == ""
    record = json.loads(path.read_text(encoding="utf-8"))
    _, *lines, last = first[1].splitlines()
    for (loss, norm), line in zip(record["ranks"], lines, strict=True):
        assert f": {loss:.9f}, {loss:.9f}; {norm:.9f}, {norm:.9f}" in line
    assert last.startswith("mesh (1, 2), float64: largest relative differences: loss ")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus(tmp_path: Path, dtype: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", program.TOOL, "--dtype", dtype]
    done = captured(command, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
