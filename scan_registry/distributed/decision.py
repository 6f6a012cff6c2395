"""Chooses the schedule of a call by the model of ``cost``, and the dimension that "pass" cuts into pieces."""

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
    """The dimension that "pass" cuts into pieces, as a negative number: the longest besides time, and of equally long
    ones the last. None if time is the only dimension. ``dim``, the time dimension, is negative."""
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
    """The model's choice for a call whose ranks have these ``steps``. ``recorded``: count the backward pass, too."""
    axis = axis_of(shape, dim)
    work = cost.linear_scan_work(
        steps,
        prod(size for d, size in enumerate(shape) if d - len(shape) != dim),
        dtype.itemsize,
        direction="both" if recorded else "forward",
        channels=1 if axis is None else max(1, shape[axis]),
        chained=device.type == "cuda" and dim != -1,
    )
    return cost.choose(work, machine_of(members.group, device), schedule)


def pieces_of(choice: cost.Choice) -> int:
    """The number of pieces of "pass", or 0 for "reduce"."""
    return choice.pieces if choice.schedule == "pass" else 0
