"""What ranks do in the test of the command that times scans over them."""

from __future__ import annotations

import contextlib
import io
import os
from unittest.mock import patch

import torch.distributed as dist

from scan_registry.cli import main


def bench_distributed(
    rank: int, ranks: int, group: object, port: int, words: list[str]
) -> tuple[int, str]:
    """The exit status of the command, and what it prints. It takes the place of this process's default group."""
    dist.destroy_process_group()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    shown = io.StringIO()
    with patch.dict(os.environ, place), contextlib.redirect_stdout(shown):
        status = main(["bench", "distributed", *words])
    return status, shown.getvalue()
