"""Which schedule a call takes."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from scan_registry.distributed.group import Members

Schedule = Literal["auto", "reduce", "pass"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def pieces_of(
    schedule: str,
    members: Members,
    lengths: list[int],
    shape: tuple[int, ...],
    dim: int,
    tokens: Tensor,
) -> int:
    """The pieces of "pass"; 0 is "reduce"."""
    return 4 if schedule == "pass" else 0
