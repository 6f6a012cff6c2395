"""How long kernels take on sequences that are packed along time, and which language is to come first for that.

The timing model says nothing of packed sequences, as their lengths are known on the GPU alone. These estimates take
lengths to be random, with the mean that the call tells. They decide between ways of working that are far apart:

- Of contiguous time, rows are cut into segments in CUDA where archives have the kernel, and rows and sequences are not short;
  nothing is faster then. Other rows are scanned by one CTA each, tile after tile; in Triton each sequence of a row has a
  program of its own.
- Of contiguous channels, ``generic`` scans a column tile after tile, and ``varlen`` has CTAs for each sequence.

The constants are fitted by eye to what ``bench --random`` timed on an H200 and an H100.
They are rough: enough to tell apart ways whose times differ several times over.
"""

from __future__ import annotations

import math

from scan_registry.hardware.target import RELEASED, Target
from scan_registry.kernels.linear_scan import cuda_tiles, streams
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, ceil_div
from scan_registry.kernels.linear_scan.space import VARLEN
from scan_registry.kernels.model import ITEM_SIZE, Language

#: ns for a step of a row in CUDA: where four warps share the row, by the bytes of an element, forward and backward; and where
#: it has one.
_SHARED_ROW, _OWN_ROW = {2: (3.4, 5.2), 4: (2.7, 3.7)}, 16.0
#: Tiles of four warps that a sequence fills on average where four warps share a row: see ``registers.walk_cost``.
_SHARED_TILES = 2
#: ms for a call that cuts rows, and ps for each element, by its bytes, forward and backward.
_CUT_CALL, _CUT_ELEMENT = 6e-3, {2: (1.9, 2.9), 4: (3.6, 5.6)}
_ELEMENT = 0.008  # ns for an element in CUDA, where there are many rows
#: ns for a step of a sequence in Triton, by the bytes of an element, forward and backward; for a program where there are
#: many, and for each of its tiles.
_TRITON_STEP, _PROGRAM, _PROGRAM_TILE = {2: (2.8, 3.3), 4: (3.5, 5.6)}, 1.0, 0.8
_TRITON_TIMES = 256  # of a tile
_FASTER = 1.2  # times that Triton has to be as fast to come first
#: ns for a step of a column in ``varlen``, by the bytes of an element, forward and backward, and for a CTA.
_COLUMN_STEP = {2: (4.0, 6.0), 4: (8.0, 13.0)}
_COLUMN_CTA, _COLUMN_WIDTH = 1000.0, 32


def languages(problem: LinearScanProblem, target: Target) -> tuple[Language, ...]:
    """In order of preference on one tier: Triton first where sequences are packed along contiguous time, and long or
    few enough for a program each, unless archives for a GPU of the capability of ``target`` cut the rows in CUDA."""
    if (
        problem.direction in ("forward", "backward")
        and problem.layout == "time_last"
        and problem.sequences > 1
        and ITEM_SIZE[problem.dtype] < 8
        and not _cuts_rows(problem, target)
        and _FASTER * triton_rows_ms(problem) < cuda_rows_ms(problem)
    ):
        return "triton", "cuda"
    return "cuda", "triton"


def _cuts_rows(problem: LinearScanProblem, target: Target) -> bool:
    """Whether rows in which sequences are packed are cut into segments. PTX has no such kernel."""
    if not (
        problem.plain()
        and problem.congruent()
        and streams.cuts_packed(problem)
        and target in map(Target.parse, RELEASED)
    ):
        return False
    kind = ("dtype", problem.dtype), ("access", VARLEN)
    tiles = cuda_tiles.packed_rows(problem.direction, problem.dtype)
    pins = (kind + tuple(tile.items()) for tile in tiles)
    return any(cuda_tiles.serves(problem.direction, statics, target) for statics in pins)


def longest(problem: LinearScanProblem) -> float:
    """Steps of the longest of the sequences, if they are cut at random."""
    mean = problem.time / problem.sequences
    return min(float(problem.time), mean * (1 + math.log(problem.sequences)))


def cuda_rows_ms(problem: LinearScanProblem) -> float:
    """Of the CUDA variant that the spec prefers for contiguous time."""
    item = ITEM_SIZE[problem.dtype]
    mean = problem.time // problem.sequences
    shared = mean >= _SHARED_TILES * 4 * 2 * 32 * (16 // item)
    elements = _rows(problem) * problem.time
    step = _SHARED_ROW[item][problem.direction == "backward"] if shared else _OWN_ROW
    return max(problem.time * step, elements * _ELEMENT) / 1e6


def cut_rows_ms(problem: LinearScanProblem) -> float:
    """Of the CUDA variant that cuts rows. The last segment of each takes the time of a whole one."""
    item = ITEM_SIZE[problem.dtype]
    tile = next(cuda_tiles.packed_rows(problem.direction, problem.dtype))
    segment = int(tile["rows"]) * int(tile["lanes"]) * int(tile["pieces"]) * 16 // item
    steps = ceil_div(problem.time, segment) * segment
    of_element = _CUT_ELEMENT[item][problem.direction == "backward"]
    return _CUT_CALL + _rows(problem) * steps * of_element / 1e9


def triton_rows_ms(problem: LinearScanProblem) -> float:
    """Of Triton's variant for contiguous time."""
    programs = _rows(problem) * problem.sequences
    tiles = ceil_div(problem.time, problem.sequences * _TRITON_TIMES)
    every = programs * (_PROGRAM + _PROGRAM_TILE * tiles)
    step = _TRITON_STEP[ITEM_SIZE[problem.dtype]][problem.direction == "backward"]
    return max(longest(problem) * step, every) / 1e6


def columns_ms(problem: LinearScanProblem, sm_count: int) -> float:
    """Of a ``varlen`` variant for contiguous channels."""
    step = _COLUMN_STEP[ITEM_SIZE[problem.dtype]][problem.direction == "backward"]
    columns = problem.outer * problem.batch * ceil_div(problem.channels, _COLUMN_WIDTH)
    waves = columns * problem.sequences / sm_count
    every = waves * (problem.time / problem.sequences * step + _COLUMN_CTA)
    return (longest(problem) * step + every) / 1e6


def _rows(problem: LinearScanProblem) -> int:
    return problem.outer * problem.batch * problem.channels
