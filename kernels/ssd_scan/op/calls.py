"""What a state space dual scan poses to the kernels, from facts about its tensors: pure, and alike for every array library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scan_registry.hardware.device import Device
from scan_registry.kernels.ssd_scan.problem import (
    SHARED_OF_BLOCK,
    Direction,
    SSDScanProblem,
    block_of,
    most_heads,
)

#: Of a GPU that is not there: as many as an H100 has.
USUAL_SMS = 132
#: CTAs of the backward pass that each SM is to get.
_CTAS_OF_SM = 4


def make_problem(
    direction: Direction,
    dtype: str,
    shape: tuple[int, ...],
    shape_of_B: tuple[int, ...],
    strides: Sequence[int],
    *,
    softplus: bool,
    limits: tuple[float, float],
    has_z: bool,
    wide_dt: bool,
    wide_D: bool,
    sequences: int,
    gpu: Device | None,
) -> SSDScanProblem:
    """What a call poses to one kernel. ``shape`` is that of x; ``gpu`` is where it runs, None if that is not known."""
    batch, time, heads, size = shape
    _, _, groups, states = shape_of_B
    problem = SSDScanProblem(
        *(direction, dtype),
        *(batch, time, heads, groups, size, states),
        strides=tuple(strides),
        has_z=direction == "forward" and has_z,
        softplus=softplus,
        wide_dt=wide_dt,
        wide_D=wide_D,
        low=limits[0],
        high=limits[1],
        sequences=sequences,
    )
    return cut(problem, gpu) if direction == "backward" else problem


def cut(problem: SSDScanProblem, gpu: Device | None) -> SSDScanProblem:
    """The problem of the backward pass with what its CTAs work on: a block of states at a time, as large as shared memory has room
    for; and splits of a group's heads, so many that CTAs fill the GPU evenly. None: a GPU that nothing is known of."""
    sms, shared = USUAL_SMS, SHARED_OF_BLOCK
    if gpu is not None:
        sms, shared = gpu.sm_count, gpu.shared_memory_per_block
    ctas, heads = problem.batch * problem.slots * problem.groups, problem.group_heads
    splits = max(-(-heads // most_heads(problem.dtype)), min(heads, -(-_CTAS_OF_SM * sms // ctas)))
    block = block_of(problem.state_size, problem.dtype, shared)
    return replace(problem, splits=-(-heads // -(-heads // splits)), block=block)
