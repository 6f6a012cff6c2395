"""What ranks do in tests of ``examples/train_sequence_parallel.py``."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from by_path import EXAMPLES, load

TOOL = EXAMPLES / "train_sequence_parallel.py"


def tool() -> ModuleType:
    module: ModuleType = load(TOOL)
    return module


def options(**given: Any) -> Namespace:
    defaults = {"time_ranks": None, "device": "cpu", "dtype": "float64", "steps": 20}
    return Namespace(
        **defaults | {"replicate": False, "checkpoint": False, "compile": None} | given
    )


def compare(rank: int, ranks: int, group: Any, given: dict[str, Any]) -> Any:
    """The record of a training."""
    return tool().compare(options(**given))


def compare_mistake(rank: int, ranks: int, group: Any, mistake: str) -> Any:
    """The record of a training with a mistake that users may make."""
    module: Any = tool()
    build, alone = module.build, dist.new_subgroups(group_size=1)[0]
    # The gradient is the mean over ranks.
    means = SimpleNamespace(**vars(dist))
    means.get_world_size = lambda group=None: 1 if group else ranks
    replaced = {
        "scale": {"dist": means},
        # Each rank scans its part as if it were a whole sequence.
        "group": {"build": lambda options, _: build(options, alone)},
    }
    with patch.multiple(module, **replaced[mistake]):
        return module.compare(options(steps=2))


def main(rank: int, ranks: int, group: Any, port: int, arguments: list[str]) -> tuple[int, str]:
    """The exit status of the program, and what it prints. It takes the place of this process's default group. The first rank
    has the program's tolerance, and the others accept no difference."""
    dist.destroy_process_group()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    module: Any = tool()
    tolerance = {"float64": -1.0} if rank else module.TOLERANCE
    shown = io.StringIO()
    with (
        patch.dict(os.environ, place),
        patch.object(sys, "argv", [TOOL.name, *arguments]),
        patch.object(module, "TOLERANCE", tolerance),
        contextlib.redirect_stdout(shown),
    ):
        status: int = module.main()
    return status, shown.getvalue()
