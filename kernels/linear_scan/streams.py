"""CUDA variants whose tiles come through a ring in shared memory: those with a number of ``stages``.

They take memory that is aligned. Of time-last kernels ``lanes`` threads share a row, each of which holds
``pieces`` of 16 bytes, and ``rows`` warps work side by side or ``warps`` share a row; channel-last ones
have ``lanes`` along the channels, each with ``vector`` of them in ``steps`` rows; or lanes ``across`` them, and
then a block walks all of time, or shares that with others, a part for each of ``parts``, which compose their
tiles some turns ``early``. Scans that are too few to fill a GPU are cut into segments of a tile for each warp of
a block, which are composed some turns ``ahead`` of their walk.
``blocks`` are meant to share a multiprocessor; they keep in step where there is a ``pace``, and those of a
``cluster`` meet with every tile. The sources are ``time_stream.cuh``, ``channel_stream.cuh``, ``column_walk.cuh`` and ``shared_walk.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem, ceil_div
from scan_registry.kernels.linear_scan.space import PACKED, RAGGED, Tile
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: Of shared memory that the blocks of a multiprocessor may have together, in bytes.
_SHARED = 220_000
#: Of one that has a multiprocessor to itself, but for a little that it keeps beside its ring.
_ALONE = 231_424
#: Rows, or states side by side, that are numbered in 32 bits.
_MOST_ROWS = 2**31 - 1
#: Bytes before a row, at most, where a walk along contiguous time may start.
LINE = 128
#: Of scans that are cut. Contiguous time: warps that walk, a lane's pieces, and rings, which are tiles of a warp in
#: shared memory and how many turns before it is walked one is composed. Few channels: rings by the steps of a tile.
_CUT = (
    ((10, 12, 16), 2, ((4, 2), (5, 3))),
    ((8, 9, 10, 11, 12), 4, ((3, 2), (4, 2), (5, 3))),
    ((16, 18), 4, ((2, 1), (3, 2))),
    ((8, 10, 12, 16), 8, ((2, 1), (3, 2))),
)
_CUT_STEPS = {4: ((4, 2),), 6: ((3, 1), (3, 2), (4, 2)), 8: ((2, 1), (3, 1), (3, 2), (4, 2))}
#: Lanes that share a row and a lane's pieces, to rows of warps, stages and the most blocks that are worth a try (which
#: ones were left out, NOTES.md says).
_SIDE_BY_SIDE: tuple[tuple[tuple[int, ...], int, tuple[tuple[int, int, int], ...]], ...] = (
    ((2, 4, 8, 16, 32), 1, ((2, 3, 8), (4, 1, 8), (4, 2, 8), (4, 3, 6))),
    ((1, 2, 4, 8, 16, 32), 2, ((2, 2, 8), (2, 3, 8), (4, 1, 8), (4, 3, 4))),
    ((16,), 1, ((4, 1, 12),)),
    ((16,), 2, ((4, 1, 12),)),
    ((16, 32), 4, ((4, 1, 8), (4, 2, 4))),
    ((32,), 4, ((6, 2, 2), (6, 3, 2), (6, 4, 2))),
    ((1, 2), 8, ((4, 3, 4),)),
    ((16, 32), 8, ((2, 1, 12), (8, 1, 2), (8, 2, 1))),
)
#: Warps, and steps and stages, of walks over columns of 64 channels beside the usual ones, by an element's bytes.
_BESIDE = {
    2: (
        *((4, (8, 7)), (4, (8, 8)), (4, (16, 4)), (4, (16, 6))),
        *((4, (18, 3)), (4, (20, 3)), (8, (16, 4))),
    ),
    4: ((4, (10, 2)),),
}
#: Channels of a lane, steps and stages of walks over float32 that have a multiprocessor to themselves.
_LONE = ((2, 16, 6), (1, 16, 11), (1, 16, 8))
#: Warps, steps and stages of walks over columns of 128 channels.
_WIDE = (
    *((4, 6, 4), (4, 8, 2), (4, 8, 3), (4, 8, 4), (4, 8, 5), (4, 12, 2), (4, 12, 3), (4, 12, 4)),
    *((4, 16, 2), (6, 8, 4), (8, 8, 2), (8, 8, 3)),
)
#: Warps, channels of a lane, steps and stages of walks over float32 that keep in step; and by an element's bytes and
#: the direction, as of narrower numbers that gains backward alone (NOTES.md).
_PACED_FLOAT32 = (
    *((8, 1, 16, 3), (8, 1, 16, 4), (2, 2, 32, 2), (4, 2, 8, 3), (4, 2, 12, 2), (4, 2, 16, 2)),
    *((8, 2, 16, 2), (4, 4, 8, 2), (4, 4, 8, 3), (4, 4, 12, 3)),
)
_PACED: dict[tuple[int, Direction], tuple[tuple[int, int, int, int], ...]] = {
    (4, "forward"): _PACED_FLOAT32,
    (4, "backward"): _PACED_FLOAT32,
    (2, "backward"): ((4, 4, 12, 2),),
}
#: Warps, steps and stages of walks over rows that start anywhere, beside the usual ones; and such as keep in step.
_RAGGED = ((4, 12, 2), (4, 12, 3), (6, 8, 2), (6, 8, 3), (6, 12, 2))
_RAGGED_PACED = ((4, 8, 3), (4, 8, 4), (4, 12, 2), (4, 16, 2), (5, 8, 3))
#: Of blocks that share a column: tiles in shared memory, and how many turns before it is walked one is composed.
_EARLY = ((4, 2), (6, 3))
#: Warps, steps and stages of walks over packed sequences of narrow numbers, with 32 channels: the more rows a tile
#: has, the sooner is the longest sequence at its end.
_PACKED = ((12, 16, 2), (16, 12, 2), (16, 20, 2))
#: Warps, steps and stages of walks over columns of 64 channels whose blocks meet their neighbours, two by two; by an
#: element's bytes and the direction, as it gains nothing else (NOTES.md).
_NEIGHBOURS: dict[tuple[int, Direction], tuple[tuple[int, int, int], ...]] = {
    (2, "backward"): ((4, 8, 4), (4, 8, 5), (4, 10, 4), (4, 12, 3), (4, 20, 2)),
}
#: Bytes of a map that they tell one another.
_WORD = 8
#: Bytes before the words in which blocks that share a column tell one another maps.
COUNTER = 256
#: Segments of a column, at least, that have a map together.
LEAST_GROUP = 16
#: Blocks that a GPU has something to do with.
_MANY = 64


def is_streamed(variant: Variant) -> bool:
    return "stages" in dict(variant.statics)


def walks(variant: Variant) -> bool:
    """Whether nothing is split along time."""
    return "across" in dict(variant.statics)


# --- Tiles ------------------------------------------------------------------------------------


def time_last(direction: Direction, dtype: str) -> Iterator[Tile]:
    """A warp's rows side by side, down to a row for each lane; or parts of rows. Rows of one tile have
    nothing to fetch ahead, but gain from more blocks at once."""
    for sharing, pieces, blocks in _SIDE_BY_SIDE:
        for lanes, (rows, stages, most) in product(sharing, blocks):
            if ITEM_SIZE[dtype] < 8 or lanes >= 16:
                tile = {"warps": 1, "rows": rows, "lanes": lanes, "pieces": pieces}
                yield from resident(direction, dtype, tile | {"stages": stages}, most)
    for walkers, pieces, rings in _CUT:
        for rows, (stages, ahead) in product(walkers, rings):
            tile = {"warps": 1, "rows": rows, "lanes": 32, "pieces": pieces}
            yield from resident(direction, dtype, tile | {"stages": stages, "ahead": ahead}, 1)


def channel_last(direction: Direction, dtype: str, access: str) -> Iterator[Tile]:
    """Walks over rows of 32 to 512 bytes; for few channels, 16 bytes to a lane, and cut."""
    each = ITEM_SIZE[dtype]
    usual = ((4, 6), (8, 3), (8, 4), (8, 5), (16, 2), (16, 3))
    for warps, (across, vector), (steps, stages) in (
        *product((4, 8, 16), ((16, 1), (32, 1), (32, 2)) if each < 8 else ((16, 1),), usual),
        *((warps, (32, 2), ring) for warps, ring in _BESIDE.get(each, ())),
        # Narrow columns are for problems that leave a multiprocessor one block.
        *product((4,), ((16, 1),), ((16, 5), (32, 3)) if each < 8 else ()),
    ):
        narrow = across == 16 and each < 8
        if (warps == 16 and (steps == 4 or narrow)) or (warps == 8 and steps == 4 and narrow):
            continue  # of every problem that is tuned, 3% slower than others at least
        tile = {
            "warps": warps,
            "across": across,
            "vector": vector,
            "steps": steps,
            "stages": stages,
        }
        yield from resident(direction, dtype, tile, 2, access)
        if warps == 16:  # more registers
            yield from resident(direction, dtype, tile, 1, access)
    if access in (PACKED, RAGGED):
        yield from (_ragged_walks if access == RAGGED else _packed_walks)(direction, dtype)
        return
    if each < 8:
        for warps, steps, stages in _WIDE:
            tile = {"warps": warps, "across": 32, "vector": 4, "steps": steps}
            yield from resident(direction, dtype, tile | {"stages": stages}, 2)
    if each == 2:
        tile = {"warps": 4, "across": 32, "vector": 2, "steps": 12, "stages": 3}
        yield from resident(direction, dtype, tile, 1)  # more registers than two would have
        yield from _shared_walks(direction, dtype)
        yield from _neighbours(direction, dtype)
    if each == 4:
        yield from _lone_walks(direction, dtype)
    yield from _in_step(direction, dtype)
    vector = 16 // each
    widths = [(8, 8, 4), (8, 8, 8), (8, 16, 4), (8, 16, 6), (8, 16, 8)]
    if each < 8:
        widths += [(4, 32, 8), (8, 32, 6), (8, 32, 8)]
    for warps, scans, steps in widths:
        for stages, ahead in _CUT_STEPS[steps]:
            if warps == 4 and stages == ahead + 1:
                continue  # of every problem that is tuned, 4% slower than others at least
            tile = {"warps": warps, "lanes": scans // vector, "vector": vector, "steps": steps}
            yield from resident(direction, dtype, tile | {"stages": stages, "ahead": ahead}, 1)


def _lone_walks(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Those that have much under way, alone on a multiprocessor."""
    for vector, steps, stages in _LONE:
        tile = {"warps": 4, "across": 32, "vector": vector, "steps": steps}
        yield from resident(direction, dtype, tile | {"stages": stages}, 1)


def _in_step(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Those of which none gets ahead of the others."""
    for warps, vector, steps, stages in _PACED.get((ITEM_SIZE[dtype], direction), ()):
        tile = {"warps": warps, "across": 32, "vector": vector, "steps": steps}
        yield from resident(direction, dtype, tile | {"stages": stages, "pace": 1}, 2)


def _neighbours(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Those that go side by side with one other."""
    for warps, steps, stages in _NEIGHBOURS.get((ITEM_SIZE[dtype], direction), ()):
        tile = {"warps": warps, "across": 32, "vector": 2, "steps": steps, "stages": stages}
        yield from resident(direction, dtype, tile | {"cluster": 2}, 2)


def _ragged_walks(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Over rows that start anywhere, of which a lane has two channels."""
    in_step = product(_RAGGED_PACED if ITEM_SIZE[dtype] == 4 else (), ({"pace": 1},))
    for (warps, steps, stages), paced in (*product(_RAGGED, ({},)), *in_step):
        tile = {"warps": warps, "across": 32, "vector": 2, "steps": steps, "stages": stages}
        yield from resident(direction, dtype, tile | paced, 2, RAGGED)


def _packed_walks(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Over sequences that follow one another, which are as long as they are."""
    for warps, steps, stages in _PACKED if ITEM_SIZE[dtype] == 2 else ():
        tile = {"warps": warps, "across": 32, "vector": 1, "steps": steps, "stages": stages}
        yield from resident(direction, dtype, tile, 1, PACKED)


def _shared_walks(direction: Direction, dtype: str) -> Iterator[Tile]:
    """Columns that several blocks walk together."""
    for parts, (stages, early) in product((3, 4, 8), _EARLY):
        tile = {"warps": 8, "across": 32, "vector": 2, "steps": 16, "stages": stages}
        yield from resident(direction, dtype, tile | {"parts": parts, "early": early}, 1)


def resident(
    direction: Direction, dtype: str, tile: Tile, most: int, access: str = ""
) -> Iterator[Tile]:
    """The tile with the number of blocks that a multiprocessor has room for, at most ``most``; of those
    that leave it neither idle nor crowded."""
    shared = _shared(direction, dtype, access, tile) + _meeting(dtype, tile)
    threads = 32 * warps(tile)
    blocks = min((_ALONE if most == 1 else _SHARED) // shared, 2048 // threads, most)
    if threads <= 1024 and blocks * threads >= 128 and blocks * shared >= 48_000:
        yield {**tile, "blocks": blocks}


def _shared(direction: Direction, dtype: str, access: str, tile: Tile) -> int:
    """Bytes of a block's ring."""
    inputs = 2 if direction == "forward" else 3
    ring = int(tile["stages"]) * int(tile["warps"])
    if "pieces" in tile:
        pieces = inputs * 32 * int(tile["pieces"])
        if direction == "backward":  # of the states one more a row
            pieces += max(8, 32 // int(tile["lanes"]))  # in whole rows of banks
        return 16 * ring * int(tile["rows"]) * pieces
    warp = 32 * int(tile["vector"]) * int(tile["steps"]) * ITEM_SIZE[dtype]
    if "across" in tile:
        groups = 32 // int(tile["across"])
        if access == RAGGED:  # one more piece a row
            warp += 16 * groups * int(tile["steps"])
        if ITEM_SIZE[dtype] < 8:  # between groups
            warp += 64 * (groups - 1)
    return ring * inputs * warp


def _meeting(dtype: str, tile: Tile) -> int:
    """Bytes, at most, that the warps of a block need to meet. Where columns are cut: in each turn a map and a
    state for each scan of a walking warp, and for each scan a state with its rest. Where they are shared: for
    each channel the maps of all groups and of the tile, and in two turns a state for each."""
    if "early" in tile:
        vector = int(tile["vector"])
        groups = 32 * int(tile["warps"]) * vector + int(tile["across"]) * vector
        return groups * ((int(tile["early"]) + 1) * 8 + 2 * 4)
    if "ahead" not in tile:
        return 0
    turns = int(tile["ahead"]) + 1
    numbers = _side_by_side(tile) * (4 * _walkers(tile) + 2)
    return turns * numbers * max(4, ITEM_SIZE[dtype])


def _walkers(tile: Tile) -> int:
    """Warps of a block that walk tiles."""
    return int(tile["warps"]) * int(tile.get("rows", 1))


def _side_by_side(tile: Tile) -> int:
    """Scans of a warp, where columns are cut."""
    return 1 if "pieces" in tile else int(tile["lanes"]) * int(tile["vector"])


def warps(tile: Tile) -> int:
    """Of a block: those that walk, and where columns are cut those that find out which states enter."""
    walkers = _walkers(tile)
    if "ahead" not in tile:
        return walkers
    return walkers + (int(tile["ahead"]) + 1) * max(1, _side_by_side(tile) * walkers // 32)


def shared(direction: Direction, variant: Variant) -> int:
    """Bytes of dynamic shared memory of a block."""
    if not is_streamed(variant):
        return 0
    tile = {name: value for name, value in variant.statics if isinstance(value, int)}
    return _shared(direction, variant.text("dtype"), variant.text("access"), tile)


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
    if _parts(variant) > 1 and problem.sums:
        return "blocks that share a column do not sum the gradient of gates"
    if _cuts(variant) and _segments(variant, problem) > _MOST_ROWS:
        return f"more than {_MOST_ROWS} segments"
    side_by_side = problem.layout == "time_last" and variant.number("lanes") < 32
    if side_by_side and not problem.folds():
        return "rows do not follow one another at one stride"
    return None


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """Where no tuning speaks: whole columns, unless they would leave most of any GPU idle; whose tiles are
    filled best, and then the widest."""
    if problem.layout == "channel_last":
        alone = walks(variant) and _parts(variant) == 1
        return float(alone != (_columns(variant, problem) >= _MANY))
    filled = ceil_div(problem.time, times(variant)) * times(variant) / max(1, problem.time)
    return 1000 * filled - _scans(variant)


def filled(text: str, sizes: Mapping[str, float]) -> float:
    """How full segments are, where scans are cut into them: a block waits for the last of its warps, whether
    all have a tile or not. Other variants ask for no bytes where there are none."""
    if ",ahead=" not in text:
        return 1.0
    try:
        variant, time = Variant.parse(text), sizes["time"]
        segment = times(variant) * _walkers(dict(variant.statics))
        return time / (math.ceil(time / segment) * segment)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return 1.0  # another version's, which is refused when it is looked at


def launch(variant: Variant, problem: LinearScanProblem, multiprocessors: int) -> Launch:
    """A block for each column, or as many as the GPU holds if that is far more; where columns are cut, a
    block for each segment, or as many as the GPU holds."""
    at_once = multiprocessors * variant.number("blocks")
    if _cuts(variant):
        segments = _segments(variant, problem)
        workspace = _workspace(variant, problem, segments)
        return Launch((min(segments, at_once), 1, 1), problem.scalars(), workspace)
    if walks(variant):
        columns, pace = _columns(variant, problem), 0
        if "pace" in dict(variant.statics) and columns <= at_once:
            # With a multiprocessor for each, one that is a tile ahead does no harm yet.
            pace = 2 if columns <= multiprocessors else 1
        if _parts(variant) == 1:
            together = int(dict(variant.statics).get("cluster", 1))
            return Launch((ceil_div(columns, together) * together, 1, 1), problem.scalars(pace))
        blocks = columns * _parts(variant)
        return Launch((blocks, 1, 1), problem.scalars(), _told(variant, blocks))
    columns = ceil_div(problem.batch * problem.channels, _scans(variant))
    return Launch((at_once if columns > 4 * at_once else columns, 1, 1), problem.scalars())


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


def _told(variant: Variant, blocks: int) -> int:
    """Bytes in which blocks that share columns tell each other maps: a counter, and a ring of tiles for each block
    with a word for each channel."""
    turns = 2 * (variant.number("early") + 1)
    return COUNTER + blocks * turns * _scans(variant) * _WORD


def crowds(variant: Variant, problem: LinearScanProblem, multiprocessors: int) -> str | None:
    """Why a GPU has no room for all blocks that share columns: others would begin when those are done."""
    parts = _parts(variant)
    if parts == 1:
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
    segment = times(variant) * _walkers(dict(variant.statics))
    return columns * ceil_div(problem.time + skipped, segment)
