"""CUDA variants whose tiles come through a ring in shared memory: those with a number of ``stages``.

They take memory that is aligned. Of time-last kernels ``lanes`` threads share a row, each of which holds
``pieces`` of 16 bytes, and ``rows`` warps work side by side or ``warps`` share a row; channel-last ones
have ``lanes`` along the channels, each with ``vector`` of them in ``steps`` rows; or lanes ``across`` them, and
then a block walks all of time, or shares that with others, a part for each of ``parts``, which compose their
tiles some turns ``early``, or as many as a GPU holds read a column at ``once``. Scans that are too few to fill a
GPU are cut into segments of a tile for each warp of a block, which are composed some turns ``ahead`` of their walk.
``blocks`` are meant to share a multiprocessor. The sources are ``time_stream.cuh``, ``channel_stream.cuh``,
``column_walk.cuh``, ``shared_walk.cuh`` and ``once.cuh``; which of them tuning may choose from, ``rings.py`` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from scan_registry.kernels.linear_scan import rings
from scan_registry.kernels.linear_scan.problem import (
    MOST_ALONG_Y,
    Direction,
    LinearScanProblem,
    ceil_div,
)
from scan_registry.kernels.linear_scan.space import RAGGED
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: Rows, or states side by side, that are numbered in 32 bits.
_MOST_ROWS = 2**31 - 1
#: Bytes before a row, at most, where a walk along contiguous time may start.
LINE = 128
#: Bytes to compose, at most, where columns are read at once: some come twice, and then from the L2.
_TWICE = 100_000_000
#: Bytes before the maps that they tell one another, and of a map.
HEAD, _WORD = 128, 8
#: Bytes before the words in which blocks that share a column tell one another maps.
COUNTER = 256
#: Segments of a column, at least, that have a map together.
LEAST_GROUP = 16
#: Blocks that a GPU has something to do with.
_MANY = 64


def is_streamed(variant: Variant) -> bool:
    return "stages" in dict(variant.statics)


def walks(variant: Variant) -> bool:
    """Whether lanes walk columns, whole or in parts."""
    return "across" in dict(variant.statics)


def shared(direction: Direction, variant: Variant) -> int:
    """Bytes of dynamic shared memory of a block."""
    if not is_streamed(variant):
        return 0
    tile = {name: value for name, value in variant.statics if isinstance(value, int)}
    return rings.shared(direction, variant.text("dtype"), variant.text("access"), tile)


def times(variant: Variant) -> int:
    """Times that a tile covers."""
    lanes = variant.number("across" if walks(variant) else "lanes")
    if variant.kernel.startswith("time_last"):
        return lanes * variant.number("pieces") * 16 // ITEM_SIZE[variant.text("dtype")]
    warps = variant.number("warps") if walks(variant) else 1
    return warps * (32 // lanes) * variant.number("steps")


def _scans(variant: Variant) -> int:
    """Side by side in a tile of a block."""
    if walks(variant):
        return variant.number("across") * variant.number("vector")
    if variant.kernel.startswith("time_last"):
        return variant.number("rows") * 32 // variant.number("lanes")
    return variant.number("lanes") * variant.number("vector")


# --- Problems ---------------------------------------------------------------------------------


def packs(problem: LinearScanProblem) -> bool:
    """Whether channel-last variants for packed sequences take it."""
    return problem.sequences > 0 and problem.plain() and problem.whole_chunks(problem.chunk())


def fits_rows(variant: Variant, problem: LinearScanProblem) -> bool:
    """Whether the variant can copy the problem's rows."""
    whole = problem.whole_chunks(problem.chunk())
    return not whole and problem.congruent() if _ragged(variant) else whole


def _ragged(variant: Variant) -> bool:
    return variant.text("access") == RAGGED


def refuses(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why the variant cannot solve a problem whose rows it can copy."""
    rows = problem.batch * problem.channels * max(1, problem.sequences)
    if rows > _MOST_ROWS:
        return f"{rows} rows; it counts {_MOST_ROWS}"
    if (_parts(variant) > 1 or _is_once(variant)) and problem.sums:
        return "blocks that share a column do not sum the gradient of gates"
    if _is_once(variant):
        return _refuses_at_once(problem)
    if _cuts(variant) and _segments(variant, problem) > _MOST_ROWS:
        return f"more than {_MOST_ROWS} segments"
    side_by_side = problem.layout == "time_last" and variant.number("lanes") < 32
    if side_by_side and not problem.folds():
        return "rows do not follow one another at one stride"
    return None


def _refuses_at_once(problem: LinearScanProblem) -> str | None:
    if problem.batch > MOST_ALONG_Y:
        return f"{problem.batch} batches; its grid has {MOST_ALONG_Y}"
    composed = 2 * problem.batch * problem.channels * problem.time * ITEM_SIZE[problem.dtype]
    if composed > _TWICE:
        return f"{composed} bytes to compose; what comes again is in no L2 beyond {_TWICE}"
    return None


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """Where no tuning speaks: whole columns, unless they would leave most of any GPU idle; whose tiles are
    filled best, and then the widest."""
    if problem.layout == "channel_last":
        alone = walks(variant) and _parts(variant) == 1 and not _is_once(variant)
        return float(alone != (_columns(variant, problem) >= _MANY))
    filled = ceil_div(problem.time, times(variant)) * times(variant) / max(1, problem.time)
    return 1000 * filled - _scans(variant)


def filled(text: str, sizes: Mapping[str, float]) -> float:
    """How full segments are, where scans are cut into them: a block waits for the last of its warps, whether
    all have a tile or not. How full columns are, where they are read at once: with many batches of few channels
    there are as many columns as with few of many. Other variants ask for no bytes where there are none."""
    if ",ahead=" not in text and ",once=" not in text:
        return 1.0
    try:
        variant, time = Variant.parse(text), sizes["time"]
        if _is_once(variant):
            channels = sizes["channels"]
            return channels / (math.ceil(channels / _scans(variant)) * _scans(variant))
        segment = times(variant) * rings.walkers(dict(variant.statics))
        return time / (math.ceil(time / segment) * segment)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return 1.0  # another version's, which is refused when it is looked at


def launch(variant: Variant, problem: LinearScanProblem, multiprocessors: int) -> Launch:
    """A block for each column, or as many as the GPU holds if that is far more; where columns are cut, a
    block for each segment, or as many as the GPU holds; where they are read at once, as many as it holds."""
    at_once = multiprocessors * variant.number("blocks")
    if _cuts(variant):
        segments = _segments(variant, problem)
        workspace = _workspace(variant, problem, segments)
        return Launch((min(segments, at_once), 1, 1), problem.scalars(), workspace)
    if _is_once(variant):
        return _launch_at_once(variant, problem, at_once)
    if walks(variant):
        blocks = _columns(variant, problem) * _parts(variant)
        if _parts(variant) == 1:
            return Launch((blocks, 1, 1), problem.scalars())
        return Launch((blocks, 1, 1), problem.scalars(), _told(variant, blocks))
    columns = ceil_div(problem.batch * problem.channels, _scans(variant))
    return Launch((at_once if columns > 4 * at_once else columns, 1, 1), problem.scalars())


def _launch_at_once(variant: Variant, problem: LinearScanProblem, room: int) -> Launch:
    """As many blocks as there is room for share the columns evenly, and their warps a part in runs of whole tiles.
    All parts but a column's last tell others a map for each channel, in what a further block has zeroed."""
    columns, tiles = _columns(variant, problem), ceil_div(problem.time, times(variant))
    each = ceil_div(tiles, max(1, min((room - 1) // columns, tiles)))  # tiles of a warp
    parts = max(1, ceil_div(tiles, max(1, each)))
    run = each * times(variant) // variant.number("warps")
    across = columns // problem.batch, problem.batch
    if parts == 1:
        return Launch((*across, 1), problem.scalars(run))
    item = _WORD if ITEM_SIZE[problem.dtype] < 4 else 2 * _WORD
    told = columns * (parts - 1) * _scans(variant) * item
    return Launch((*across, 1 + parts), problem.scalars(run), HEAD + told, zeroed=False)


def _workspace(variant: Variant, problem: LinearScanProblem, segments: int) -> int:
    """Bytes that blocks exchange maps in: lines of 16, each three words and a mark. A counter has one, and the
    map of a scan in a segment, or in a group of them, as many as its numbers need."""
    words = 2 if ITEM_SIZE[problem.dtype] == 8 else 1
    with_rest = ITEM_SIZE[problem.dtype] >= 4
    of_map = ceil_div((3 if with_rest else 2) * words, 3)
    scans = 1 if problem.layout == "time_last" else _scans(variant)
    return 16 * (1 + scans * (segments + segments // LEAST_GROUP) * of_map)


def _columns(variant: Variant, problem: LinearScanProblem) -> int:
    """Columns that are walked."""
    return problem.batch * max(1, problem.sequences) * ceil_div(problem.channels, _scans(variant))


def _parts(variant: Variant) -> int:
    """Blocks that share a column."""
    return int(dict(variant.statics).get("parts", 1))


def _is_once(variant: Variant) -> bool:
    """Whether many blocks read a column at once."""
    return "once" in dict(variant.statics)


def _told(variant: Variant, blocks: int) -> int:
    """Bytes in which blocks that share columns tell each other maps: a counter, and a ring of tiles for each block
    with a word for each channel."""
    turns = 2 * (variant.number("early") + 1)
    return COUNTER + blocks * turns * _scans(variant) * _WORD


def crowds(variant: Variant, problem: LinearScanProblem, multiprocessors: int) -> str | None:
    """Why a GPU has no room for all blocks that share columns: others would begin when those are done."""
    parts = _parts(variant)
    if parts == 1 and not _is_once(variant):
        return None
    columns = _columns(variant, problem)
    blocks, room = columns * parts, multiprocessors * variant.number("blocks")
    return (
        f"{blocks} blocks share {columns} columns, and {room} run at once"
        if blocks > room
        else None
    )


def _cuts(variant: Variant) -> bool:
    """Whether scans are cut into segments."""
    return "ahead" in dict(variant.statics)


def _segments(variant: Variant, problem: LinearScanProblem) -> int:
    """Of all columns, if the variant cuts them."""
    if problem.layout == "time_last":
        columns = problem.batch * problem.channels
    else:
        columns = problem.batch * ceil_div(problem.channels, _scans(variant))
    skipped = LINE // ITEM_SIZE[problem.dtype] - 1 if _ragged(variant) else 0
    segment = times(variant) * rings.walkers(dict(variant.statics))
    return columns * ceil_div(problem.time + skipped, segment)
