"""What ranks do in the test of what is measured of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from scan_registry import distributed
from scan_registry.distributed.calibration import machine_of
from scan_registry.distributed.machines import default


def check_measured(rank: int, ranks: int, group: Any) -> None:
    """Of the group of all processes, of which there are two, and of no other."""
    cpu, world = torch.device("cpu"), dist.group.WORLD
    assert machine_of(world, cpu) == default("cpu")
    found = distributed.measure()
    assert machine_of(world, cpu) is found
    held: list[Any] = [None, None]
    dist.all_gather_object(held, found)
    assert held[0] == held[1], held
    assert found.memory > 1e8
    assert found.link > 1e6
    assert found.piece >= found.launch > 0
    assert 0 < found.all_gather(2, 0) < 1
    assert "measured" in found.source
    assert found.ranks_per_node == 2
    # A group of its own is not measured with the first.
    assert machine_of(dist.new_group(), cpu) == default("cpu")
    dist.barrier()  # A rank that left now would cut off another that is still connecting.
