"""CUDA variants whose tiles come through a ring in shared memory: those with a number of ``stages``.

They take memory that is aligned. Of time-last kernels ``lanes`` threads share a row, each of which holds
``pieces`` of 16 bytes, and ``rows`` warps work side by side or ``warps`` share a row; channel-last ones
have ``lanes`` along the channels, each with ``vector`` of them in ``steps`` rows; or lanes ``across`` them, and
then a block walks all of time. ``blocks`` are meant to share a multiprocessor. The sources
are ``time_stream.cuh``, ``channel_stream.cuh`` and ``column_walk.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem, ceil_div
from scan_registry.kernels.linear_scan.space import PACKED, RAGGED, Tile
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: Of shared memory that the blocks of a multiprocessor may have together, in bytes.
_SHARED = 220_000
#: Rows, or states side by side, that are numbered in 32 bits.
_MOST_ROWS = 2**31 - 1
#: Bytes before a row, at most, where a walk along contiguous time may start.
_LINE = 128
#: Blocks that a GPU has something to do with.
_MANY = 64
#: Of the blocks that a GPU holds, what columns have to fill not to be split, and tiles that are worth
#: splitting.
_FILLED, _FEWEST_TILES = 0.75, 4


def is_streamed(variant: Variant) -> bool:
    return "stages" in dict(variant.statics)


def walks(variant: Variant) -> bool:
    """Whether nothing is split along time."""
    return "across" in dict(variant.statics)


# --- Tiles ------------------------------------------------------------------------------------


def time_last(direction: Direction, dtype: str) -> Iterator[Tile]:
    """A warp's rows side by side, down to a row for each lane; or 4 to 16 warps for one. Rows of one tile
    have nothing to fetch ahead, but gain from more blocks at once."""
    wide = ITEM_SIZE[dtype] == 8
    lanes_of = (16, 32) if wide else (1, 2, 4, 8, 16, 32)
    crowd = 4 if wide else 8
    for lanes, pieces, (stages, most) in product(lanes_of, (2, 4), ((1, crowd), (2, 4), (3, 4))):
        tile = {"warps": 1, "rows": 4, "lanes": lanes, "pieces": pieces, "stages": stages}
        yield from resident(direction, dtype, tile, most)
    for warps, pieces, stages in product((4, 8, 16), (2, 4), (3, 4)):
        tile = {"warps": warps, "rows": 1, "lanes": 32, "pieces": pieces, "stages": stages}
        yield from resident(direction, dtype, tile, 4)


def channel_last(direction: Direction, dtype: str, access: str) -> Iterator[Tile]:
    """Walks over rows of 32 to 256 bytes; for few channels, 16 bytes to a lane, and split."""
    each = ITEM_SIZE[dtype]
    for warps, (across, vector), (steps, stages) in product(
        (4, 8, 16),
        ((16, 1), (32, 1), (32, 2)) if each < 8 else ((16, 1),),
        ((4, 6), (8, 3), (8, 4), (8, 5), (16, 2), (16, 3)),
    ):
        tile = {"warps": warps, "across": across, "vector": vector}
        rows, copied = steps * 32 // across, 512 // (across * vector * each)  # of a warp, at once
        if rows % copied == 0:
            tile |= {"steps": steps, "stages": stages}
            yield from resident(direction, dtype, tile, 2)
    if access in (PACKED, RAGGED):
        return
    vector = 16 // each
    for warps, scans, steps, stages in product((4, 8, 16), (8, 16, 32), (4, 8), (3, 4)):
        if scans % vector == 0 and scans > vector:
            tile = {"warps": warps, "lanes": scans // vector, "vector": vector}
            tile |= {"steps": steps, "stages": stages}
            yield from resident(direction, dtype, tile, 4 if each < 8 and scans < 32 else 2)


def resident(direction: Direction, dtype: str, tile: Tile, most: int) -> Iterator[Tile]:
    """The tile with the number of blocks that a multiprocessor has room for, at most ``most``; of those
    that leave it neither idle nor crowded."""
    shared = _shared(direction, dtype, tile)
    threads = 32 * int(tile["warps"]) * int(tile.get("rows", 1))
    blocks = min(_SHARED // shared, 1024 // threads, most)
    if blocks * threads >= 128 and blocks * shared >= 48_000:
        yield {**tile, "blocks": blocks}


def _shared(direction: Direction, dtype: str, tile: Tile) -> int:
    """Bytes of a block's ring."""
    number = {name: int(value) for name, value in tile.items()}
    inputs = 2 if direction == "forward" else 3
    if "pieces" in number:
        pieces = inputs * 32 * number["pieces"]
        if direction == "backward":  # of the states one more a row
            pieces += 32 // number["lanes"]
        return 16 * number["stages"] * number["warps"] * number["rows"] * pieces
    elements = 32 * number["warps"] * number["vector"] * number["steps"]
    return number["stages"] * inputs * elements * ITEM_SIZE[dtype]


def shared(direction: Direction, variant: Variant) -> int:
    """Bytes of dynamic shared memory of a block."""
    if not is_streamed(variant):
        return 0
    tile = {name: value for name, value in variant.statics if isinstance(value, int)}
    return _shared(direction, variant.text("dtype"), tile)


def times(variant: Variant) -> int:
    """Times that a tile covers."""
    lanes = variant.number("across" if walks(variant) else "lanes")
    if variant.kernel.startswith("time_last"):
        items = variant.number("pieces") * 16 // ITEM_SIZE[variant.text("dtype")]
        return variant.number("warps") * lanes * items
    return variant.number("warps") * (32 // lanes) * variant.number("steps")


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
    side_by_side = problem.layout == "time_last" and variant.number("lanes") < 32
    if side_by_side and not problem.folds():
        return "rows do not follow one another at one stride"
    return None


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """Where no tuning speaks: walks, unless they would leave most of any GPU idle; whose tiles are filled
    best, and then the widest."""
    if problem.layout == "channel_last":
        lines = problem.batch * max(1, problem.sequences)
        enough = lines * ceil_div(problem.channels, _scans(variant)) >= _MANY
        return float(walks(variant) != enough)
    filled = ceil_div(problem.time, times(variant)) * times(variant) / max(1, problem.time)
    return 1000 * filled - _scans(variant)


def launch(variant: Variant, problem: LinearScanProblem, multiprocessors: int) -> Launch:
    """A block for each column where those fill the GPU, or as many as it holds if that is far more; else
    columns are split into tiles, which as many blocks as it holds share."""
    if walks(variant):
        lines = problem.batch * max(1, problem.sequences)
        width = _scans(variant) - (problem.chunk() if _ragged(variant) else 0)
        columns = lines * ceil_div(problem.channels, width)
        return Launch((columns, 1, 1), problem.scalars())
    scans, at_once = _scans(variant), multiprocessors * variant.number("blocks")
    if problem.layout == "time_last":
        columns = ceil_div(problem.batch * problem.channels, scans)
        splits = variant.number("warps") > 1
        if not splits:
            blocks = at_once if columns > 4 * at_once else columns
            return Launch((blocks, 1, 1), problem.scalars())
    else:
        columns = problem.batch * ceil_div(problem.channels, scans)
    skipped = _LINE // ITEM_SIZE[problem.dtype] - 1 if _ragged(variant) else 0
    levels = ceil_div(problem.time + skipped, times(variant))
    if columns >= _FILLED * at_once or levels < _FEWEST_TILES:
        return Launch((columns, 1, 1), problem.scalars())
    words = 2 if ITEM_SIZE[problem.dtype] == 8 else 1
    with_rest = ITEM_SIZE[problem.dtype] >= 4
    lines = ceil_div(
        (3 if with_rest else 2) * words, 3
    )  # of 16 bytes, for a map: three words and a mark
    blocks = columns * min(levels, max(1, at_once // columns))
    return Launch(
        (blocks, 1, 1),
        problem.scalars(),
        16 * (ceil_div(columns, 4) + scans * columns * levels * lines),
    )
