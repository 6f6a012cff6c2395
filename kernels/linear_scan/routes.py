"""Layouts that no fast CUDA kernel reads as they lie: whether Triton comes before CUDA, and whether the scan runs on copies.

CUDA passes over the time steps of such layouts one tile after the other, so few SMs have work. The layouts are packed sequences,
and contiguous channels that share gates. They do not include packed rows of contiguous time that CUDA cuts into segments, nor
packed aligned channels, where each sequence has CTAs of its own.

- Triton has a program for each packed sequence.
- A copy gives each channel a row of contiguous time, which CUDA cuts into segments. The results are copied back.

``notes/varlen.md`` has the times that the limits below follow from.
"""

from __future__ import annotations

from dataclasses import replace

from scan_registry.hardware.target import RELEASED, Target
from scan_registry.kernels.linear_scan import cuda_tiles, streams
from scan_registry.kernels.linear_scan.problem import (
    STRIDED,
    LinearScanProblem,
    Strides,
    ceil_div,
)
from scan_registry.kernels.linear_scan.space import VARLEN
from scan_registry.kernels.model import ITEM_SIZE, LANGUAGES, Language, Route

#: Contiguous time: steps of a sequence from which Triton's programs have enough to do, and rows for a step below which there are
#: so few programs. Contiguous channels: sequences beyond which the longest one's steps are few of all.
_LONG, _ROWS_FOR_A_STEP, _FEW_SEQUENCES = 400, 7, 8
#: Copies: the most rows, sequences of all rows, and bytes of all copies of a call together; the least steps of a row, and of a
#: sequence. They were timed on GPUs of one capability alone.
_MOST_ROWS, _MOST_SEQUENCES, MOST_BYTES, LEAST_TIME, LEAST_MEAN = 256, 4096, 1 << 30, 4096, 128
_TIMED = (9, 0)

_INPUTS = {"forward": ("gates", "tokens"), "backward": ("gates", "states", "states_grad")}
_RESULTS = {"forward": ("states",), "backward": ("gates_grad", "tokens_grad")}


def languages(problem: LinearScanProblem, target: Target) -> tuple[Language, ...]:
    """In order of preference on one tier, on GPUs of the capability of ``target``."""
    if (
        problem.direction in _RESULTS
        and problem.sequences > 1
        and ITEM_SIZE[problem.dtype] < 8
        and _has_few_programs(problem, target)
    ):
        return "triton", "cuda"
    return LANGUAGES


def _has_few_programs(problem: LinearScanProblem, target: Target) -> bool:
    """Whether CUDA takes the steps of packed sequences in turn, and Triton's programs for each are few, or each is long."""
    if problem.layout == "channel_last":
        return problem.sequences > _FEW_SEQUENCES and not streams.packs(problem)
    cut = problem.plain() and problem.congruent() and streams.cuts_packed(problem)
    if cut and _cuts_rows(problem, target):
        return False
    mean = problem.time / problem.sequences
    return mean >= _LONG or _rows(problem) < _ROWS_FOR_A_STEP * mean


def _cuts_rows(problem: LinearScanProblem, target: Target) -> bool:
    """Whether archives for GPUs of a capability have a kernel that cuts rows in which sequences are packed. PTX has none."""
    kind = ("dtype", problem.dtype), ("access", VARLEN)
    tiles = cuda_tiles.packed_rows(problem.direction, problem.dtype)
    pins = (kind + tuple(tile.items()) for tile in tiles)
    return target in map(Target.parse, RELEASED) and any(
        cuda_tiles.serves(problem.direction, statics, target) for statics in pins
    )


def _rows(problem: LinearScanProblem) -> int:
    return problem.outer * problem.batch * problem.channels


def route(problem: LinearScanProblem, target: Target) -> Route | None:
    """The route of few contiguous channels of long sequences; None for a problem that is solved as it lies."""
    if (
        problem.direction not in _RESULTS
        or problem.layout != "channel_last"
        or problem.sums
        or problem.gates_dtype != problem.dtype
        or ITEM_SIZE[problem.dtype] == 8
        or target.capability != _TIMED
        or (streams.packs(problem) if problem.sequences else problem.plain())
        or problem.time < max(LEAST_TIME, LEAST_MEAN * problem.sequences)
        or _rows(problem) > _MOST_ROWS
        or _rows(problem) * problem.sequences > _MOST_SEQUENCES
    ):
        return None
    rows = as_rows(problem)
    return rows if rows and rows.bytes <= MOST_BYTES else None


def as_rows(problem: LinearScanProblem) -> Route | None:
    """Contiguous channels as rows of whole chunks of contiguous time; None if states do not fold. They stay where they are."""
    state = problem.strides_of("state")
    if problem.outer > 1 and state.outer != problem.batch * state.batch:
        return None
    chunk, direction = problem.chunk(), problem.direction
    pitch = ceil_div(problem.time, chunk) * chunk
    rows = Strides(0, problem.channels * pitch, pitch, 1)
    posed = replace(
        problem,
        layout="time_last",
        outer=1,
        batch=problem.outer * problem.batch,
        strides=(*(rows,) * (len(STRIDED[direction]) - 1), replace(state, outer=0)),
        alignment=16,
    )
    inputs, outputs = _INPUTS[direction], _RESULTS[direction]
    of_one = _rows(problem) * pitch * ITEM_SIZE[problem.dtype]
    return Route("rows", posed, inputs, outputs, (len(inputs) + len(outputs)) * of_one)
