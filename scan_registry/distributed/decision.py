"""Which schedule a call takes, by the model of ``cost``, and how its channels are cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, get_args

import torch

from scan_registry.distributed import cost
from scan_registry.distributed.calibration import machine_of
from scan_registry.distributed.group import Members

Schedule = Literal["auto", "reduce", "pass"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def axis_of(shape: Sequence[int], dim: int) -> int | None:
    """The dimension that pieces are cut along, negative: the longest beside time, of two the later one. None if time is
    the only one. ``dim`` is negative."""
    others = [d for d in range(-len(shape), 0) if d != dim]
    return max(others, key=lambda d: (shape[d], d), default=None)


def choice_of(
    schedule: str,
    members: Members,
    steps: Sequence[int],
    shape: Sequence[int],
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    recorded: bool,
) -> cost.Choice:
    """What the model says of a call whose ranks have so many steps; ``recorded`` is whether it has a backward pass."""
    axis = axis_of(shape, dim)
    work = cost.linear_scan_work(
        steps,
        prod(size for d, size in enumerate(shape) if d - len(shape) != dim),
        dtype.itemsize,
        direction="both" if recorded else "forward",
        channels=1 if axis is None else max(1, shape[axis]),
    )
    return cost.choose(work, machine_of(members.group, device), schedule)


def pieces_of(choice: cost.Choice) -> int:
    """The pieces of "pass"; 0 is "reduce"."""
    return choice.pieces if choice.schedule == "pass" else 0
