"""Whether Triton comes before CUDA: where no fast CUDA kernel takes packed sequences.

CUDA then passes over the time steps one tile after the other, so few SMs have work. Triton has a program for each sequence.
``notes/varlen.md`` has the times that the limits below follow from.
"""

from __future__ import annotations

from scan_registry.hardware.target import RELEASED, Target
from scan_registry.kernels.linear_scan import cuda_tiles, scalar, streams
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.linear_scan.space import VARLEN
from scan_registry.kernels.model import ITEM_SIZE, LANGUAGES, Language

#: Contiguous time: steps of a sequence from which Triton's programs have enough to do, and rows for a step below which there are
#: so few programs. Contiguous channels: sequences beyond which the longest one's steps are few of all.
_LONG, _ROWS_FOR_A_STEP, _FEW_SEQUENCES = 400, 7, 8


def languages(problem: LinearScanProblem, target: Target) -> tuple[Language, ...]:
    """In order of preference on one tier, on GPUs of the capability of ``target``."""
    if (
        problem.direction in ("forward", "backward")
        and problem.sequences > 1
        and ITEM_SIZE[problem.dtype] < 8
        and _has_few_programs(problem, target)
    ):
        return "triton", "cuda"
    return LANGUAGES


def _has_few_programs(problem: LinearScanProblem, target: Target) -> bool:
    """Whether CUDA takes the steps of packed sequences in turn, and Triton's programs for each are few, or each is long."""
    if problem.layout == "channel_last":
        is_fast = streams.packs(problem) or scalar.packs(problem)
        return problem.sequences > _FEW_SEQUENCES and not is_fast
    cut = problem.plain() and problem.congruent() and streams.cuts_packed(problem)
    if cut and streams.outlasts_launch(problem) and _cuts_rows(problem, target):
        return False
    mean = problem.time / problem.sequences
    return mean >= _LONG or problem.scans < _ROWS_FOR_A_STEP * mean


def _cuts_rows(problem: LinearScanProblem, target: Target) -> bool:
    """Whether archives for GPUs of a capability have a kernel that cuts rows in which sequences are packed. PTX has none."""
    kind = ("dtype", problem.dtype), ("access", VARLEN)
    tiles = cuda_tiles.packed_rows(problem.direction, problem.dtype)
    pins = (kind + tuple(tile.items()) for tile in tiles)
    return target in map(Target.parse, RELEASED) and any(
        cuda_tiles.serves(problem.direction, statics, target) for statics in pins
    )
