"""CUDA variants whose tiles come through a ring in shared memory: those with a number of ``stages``.

Most take memory that is aligned to 16 bytes. Which static parameters a variant has says how it works:

- Time contiguous (``time_stream.cuh``): ``lanes`` threads share a row, each holds ``pieces`` of 16 bytes of it, and
  a CTA has ``rows`` warps.
- Channels contiguous and many (``column_serial.cuh``): ``lanes_across`` threads lie side by side along the channels,
  each with ``vector`` channels in ``steps`` time steps, and a CTA passes over all of time serially. With
  ``ctas_per_column`` (``multi_cta_column.cuh``) several CTAs take the tiles of one column in turn, and publish a
  tile's aggregate ``aggregate_lead`` turns before they need its states. With ``single_wave`` (``single_wave.cuh``)
  all tiles of a column are read at once by as many CTAs as the GPU holds.
- Channels contiguous and few (``channel_stream.cuh``): ``lanes`` threads along the channels, each with ``vector`` of
  them in ``steps`` time steps.
- Few scans of either layout (``lookback.cuh``) are cut into segments, a tile for each warp of a CTA; a segment's
  aggregate is computed ``prefix_lead`` turns before its states.

``blocks`` CTAs are meant to share an SM. Which of these tuning may choose from, ``rings.py`` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from scan_registry.kernels.linear_scan import rings
from scan_registry.kernels.linear_scan.problem import (
    MOST_ALONG_Y,
    SUM_STEPS,
    Direction,
    LinearScanProblem,
    ceil_div,
)
from scan_registry.kernels.linear_scan.space import MISALIGNED, VARLEN
from scan_registry.kernels.model import ITEM_SIZE, Launch, Variant

#: Rows, or states side by side, that are numbered in 32 bits.
_MOST_ROWS = 2**31 - 1
#: Bytes before a misaligned row of contiguous time, at most, where its scan may start.
LINE = 128
#: Single wave: the most bytes of gates and tokens. Some are read twice, the second time from the L2.
_TWICE = 100_000_000
#: Bytes before what CTAs publish in a workspace that one of them may zero; of single wave, of a descriptor.
HEAD, _WORD = 128, 8
#: Several CTAs to a column: bytes before the descriptors.
COUNTER = 256
#: Segments of a column, at least, that publish one aggregate together.
LEAST_GROUP = 16
#: CTAs that keep a GPU busy.
_MANY = 64
#: Packed rows: the relative time of a turn where each warp has whole rows, and where rows are cut; and that of looking back, which a
#: cut launch takes besides.
_WHOLE_TURN, _CUT_TURN, _LOOKBACK = 2, 3, 6
#: Packed rows: the most tiles of a row for which a warp may have several whole rows; and tiles of a row from which idle warps in its
#: last segment do not matter.
_FEW_TILES, _MANY_TILES = 8, 1024
#: The least steps of a row that is cut, if sequences are packed in it or the gradient of gates is summed; and the least steps of a
#: sequence in the mean, if there are states before or after each.
_LEAST_ROW, _LEAST_MEAN = 4096, 64
#: Elements of all packed rows, by whether there are states, from which rows of so many steps are cut, too.
_LARGE, _SHORT_ROW = {False: 1 << 16, True: 3 << 17}, 160
#: A cost beyond all others.
_PREFERRED = 1e6
#: Of whole rows in which the gradient of gates is summed, for which no table has times: the steps that take as long as a turn does
#: beside its steps, and steps of a row from which that counts.
_TURN, _SEVERAL_TURNS = 128, 1024


def is_streamed(variant: Variant) -> bool:
    return "stages" in dict(variant.statics)


def is_column_serial(variant: Variant) -> bool:
    """Whether a CTA passes serially over the time steps of a column of channels, or of a part of it."""
    return "lanes_across" in dict(variant.statics)


def takes_one_gate(variant: Variant) -> bool:
    """Whether it takes rows or channels that have one gate for all time steps."""
    statics = dict(variant.statics)
    if not is_column_serial(variant):
        return True
    direction: Direction = "forward" if variant.kernel.endswith("forward") else "backward"
    return rings.takes_one_gate(direction, variant.text("dtype"), variant.text("access"), statics)


def sums(variant: Variant) -> bool:
    """Whether a backward variant can sum the gradient of gates over time."""
    if is_column_serial(variant):
        return takes_one_gate(variant)
    if variant.text("access") == VARLEN:
        return False
    if variant.kernel.startswith("time_last"):
        return True
    return variant.number("steps") <= 4 and times(variant) >= SUM_STEPS


def shared(direction: Direction, variant: Variant) -> int:
    """Bytes of dynamic shared memory of a block."""
    tile = {name: value for name, value in variant.statics if isinstance(value, int)}
    return rings.shared(direction, variant.text("dtype"), variant.text("access"), tile)


def times(variant: Variant) -> int:
    """Time steps that a tile covers."""
    lanes = variant.number("lanes_across" if is_column_serial(variant) else "lanes")
    if variant.kernel.startswith("time_last"):
        return lanes * variant.number("pieces") * 16 // ITEM_SIZE[variant.text("dtype")]
    warps = variant.number("warps") if is_column_serial(variant) else 1
    return warps * (32 // lanes) * variant.number("steps")


def scans(variant: Variant) -> int:
    """Scans side by side in a tile of a CTA."""
    if is_column_serial(variant):
        return variant.number("lanes_across") * variant.number("vector")
    if variant.kernel.startswith("time_last"):
        return variant.number("rows") * 32 // variant.number("lanes")
    return variant.number("lanes") * variant.number("vector")


# --- Problems ---------------------------------------------------------------------------------


def packs(problem: LinearScanProblem) -> bool:
    """Whether channel-last variants for packed sequences take it."""
    return problem.sequences > 0 and problem.plain() and problem.whole_chunks(problem.chunk())


def cuts_packed(problem: LinearScanProblem) -> bool:
    """Whether variants for packed sequences are faster than generic ones. Rows are long, or many. Where there are states before or
    after sequences, these are not short, and backward rows are long: a lane's code for sequences in its elements is slow then."""
    is_large = _elements(problem) >= _LARGE[problem.has_states]
    is_slow = problem.has_states and problem.direction == "backward"
    least = _SHORT_ROW if is_large and not is_slow else _LEAST_ROW
    return problem.time >= max(least, _LEAST_MEAN * problem.sequences * problem.has_states)


def outlasts_launch(problem: LinearScanProblem) -> bool:
    """Whether packed rows are so long, or so many, that they take longer than launching the kernels which look back."""
    return problem.time >= _LEAST_ROW or _elements(problem) >= _LARGE[True]


def _elements(problem: LinearScanProblem) -> int:
    return problem.batch * problem.channels * problem.time


def accepts(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why the variant cannot copy the problem's rows, or solve it."""
    if not fits_rows(variant, problem):
        chunk = problem.chunk()
        return f"rows do not lie in chunks of {chunk} {problem.dtype} as it needs them"
    if problem.has_one_gate() and not takes_one_gate(variant):
        return "each channel has one gate for all time steps"
    wide = is_column_serial(variant) and rings.is_wide(dict(variant.statics))
    if wide and takes_misaligned(variant) and problem.time < times(variant):
        return f"a tile has {times(variant)} time steps: narrower ones are faster"
    return refuses(variant, problem)


def fits_rows(variant: Variant, problem: LinearScanProblem) -> bool:
    """Whether the variant can copy the problem's rows. Variants for misaligned rows also take aligned ones where the gradient of
    a row's gate is summed, since no aligned variant that sums it is fast for rows too short to be cut."""
    whole = problem.whole_chunks(problem.chunk())
    if not takes_misaligned(variant):
        return whole
    return problem.congruent() and (
        not whole or _sums_rows(problem) or variant.text("access") == VARLEN
    )


def _sums_rows(problem: LinearScanProblem) -> bool:
    return problem.sums and problem.layout == "time_last"


def takes_misaligned(variant: Variant) -> bool:
    """Whether the variant takes rows that start or end off a 16-byte boundary. Where sequences are packed along rows of
    contiguous time, one variant takes all rows."""
    access = dict(variant.statics).get("access")
    return access == MISALIGNED or (access == VARLEN and variant.kernel.startswith("time_last"))


def refuses(variant: Variant, problem: LinearScanProblem) -> str | None:
    """Why the variant cannot solve a problem whose rows it can copy."""
    rows = problem.batch * problem.channels * max(1, problem.sequences)
    if rows > _MOST_ROWS:
        return f"{rows} rows; it counts {_MOST_ROWS}"
    if (_ctas_per_column(variant) > 1 or _is_single_wave(variant)) and problem.sums:
        return "blocks that share a column do not sum the gradient of gates"
    if _is_single_wave(variant):
        return _refuses_single_wave(problem)
    if _cuts(variant):
        return _refuses_segments(variant, problem)
    side_by_side = problem.layout == "time_last" and variant.number("lanes") < 32
    if side_by_side and not problem.folds():
        return "rows do not follow one another at one stride"
    return None


def _refuses_segments(variant: Variant, problem: LinearScanProblem) -> str | None:
    if _segments(variant, problem) > _MOST_ROWS:
        return f"more than {_MOST_ROWS} segments"
    if _sums_rows(problem) and problem.time < _LEAST_ROW:
        return f"rows of {problem.time} steps would fill a part of a segment"
    return None


def _refuses_single_wave(problem: LinearScanProblem) -> str | None:
    if problem.batch > MOST_ALONG_Y:
        return f"{problem.batch} batches; its grid has {MOST_ALONG_Y}"
    composed = 2 * problem.batch * problem.channels * problem.time * ITEM_SIZE[problem.dtype]
    if composed > _TWICE:
        return f"{composed} bytes of gates and tokens; it reads some twice, and more than {_TWICE} are in no L2"
    return None


def cost(variant: Variant, problem: LinearScanProblem) -> float:
    """The preference without tuning. Contiguous channels: whole columns, unless they would leave most of any GPU
    idle. Contiguous time: tiles that rows fill best, and of these the widest."""
    if problem.layout == "channel_last":
        alone = (
            is_column_serial(variant)
            and _ctas_per_column(variant) == 1
            and not _is_single_wave(variant)
        )
        return float(alone != (_columns(variant, problem) >= _MANY))
    if problem.sequences:
        return -_PREFERRED if cuts_packed(problem) else _PREFERRED
    padded = ceil_div(problem.time, times(variant)) * times(variant) / max(1, problem.time)
    turn = _TURN / times(variant) if problem.sums and problem.time >= _SEVERAL_TURNS else 0
    return 1000 * padded * (1 + turn) - scans(variant)


def tile_efficiency(text: str, sizes: Mapping[str, float]) -> float:
    """The share of a variant's work that the problem needs. Scans that are cut: how full segments are, since a CTA
    waits for all of its warps, whether each has a tile or not. Single wave: how full columns are, since a column of
    few channels takes as long as a full one. Other variants load nothing beyond the problem: 1; nor do those of packed rows of
    contiguous time, which follow one another."""
    if ",prefix_lead=" not in text and ",single_wave=" not in text:
        return 1.0
    try:
        variant, time = Variant.parse(text), sizes["time"]
        if _is_single_wave(variant):
            channels = sizes["channels"]
            return channels / (math.ceil(channels / scans(variant)) * scans(variant))
        if variant.text("access") == VARLEN and variant.kernel.startswith("time_last"):
            return 1.0
        segment = times(variant) * rings.tile_warps(dict(variant.statics))
        return time / (math.ceil(time / segment) * segment)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return 1.0  # another version's, which is refused when it is looked at


def launch(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """One CTA for each column, but if these are far more than the GPU holds at once, as many as it holds. Scans that
    are cut: one CTA for each segment, and one that zeroes the workspace, or as many as the GPU holds. Single wave: as many
    as it holds."""
    at_once = sm_count * variant.number("blocks")
    if _cuts(variant):
        if variant.text("access") == VARLEN:
            return _launch_packed(variant, problem, sm_count)
        segments = _segments(variant, problem)
        workspace = _workspace(variant, problem, segments)
        ctas, zeroed = min(segments + 1, at_once), segments >= at_once
        return Launch(
            (ctas, 1, 1), problem.scalars(), workspace, zeroed, _tiles_of_scan(variant, problem)
        )
    if _is_single_wave(variant):
        return _launch_single_wave(variant, problem, at_once)
    if is_column_serial(variant):
        blocks = _columns(variant, problem) * _ctas_per_column(variant)
        if _ctas_per_column(variant) == 1:
            return Launch((blocks, 1, 1), problem.scalars(), pieces=1)
        return Launch((blocks, 1, 1), problem.scalars(), descriptor_bytes(variant, blocks))
    columns = ceil_div(problem.batch * problem.channels, scans(variant))
    ctas = at_once if columns > 4 * at_once else columns
    return Launch((ctas, 1, 1), problem.scalars(), pieces=1)


def _launch_packed(variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
    """Rows in which sequences are packed follow one another in columns, since the scan starts anew with each. Either each warp has a
    column to itself; or columns are cut, and have as many rows as leave the fewest warps of segments without a tile."""
    warps, rows = rings.tile_warps(dict(variant.statics)), problem.batch * problem.channels
    tiles, together = _tiles_of_row(variant, problem), ceil_div(rows, sm_count * warps)
    if _are_whole_rows_faster(tiles, together, rows / (sm_count * warps)):
        columns = ceil_div(rows, together)
        own = ceil_div(columns, sm_count)
        return Launch((ceil_div(columns, own), 1, 1), problem.scalars(own | together << 8))

    def segments_of(together: int) -> int:
        return ceil_div(rows, together) * ceil_div(together * tiles, warps)

    together = min(range(1, 1 + (min(rows, warps) if tiles < _MANY_TILES else 1)), key=segments_of)
    segments = segments_of(together)
    ctas, zeroed = min(segments + 1, sm_count), segments >= sm_count
    workspace = _workspace(variant, problem, segments)
    return Launch((ctas, 1, 1), problem.scalars(together << 8), workspace, zeroed)


def _are_whole_rows_faster(tiles: int, together: int, share: float) -> bool:
    """Whether packed rows are scanned faster where each warp has ``together`` of them. ``share`` is how many each would have if all
    had the same."""
    turns = _WHOLE_TURN * together * tiles, _CUT_TURN * share * tiles
    return (together == 1 or tiles <= _FEW_TILES) and turns[0] <= turns[1] + _LOOKBACK


def _launch_single_wave(variant: Variant, problem: LinearScanProblem, resident: int) -> Launch:
    """As many CTAs as there is room for share the columns evenly, and the warps of a CTA its part in runs of whole tiles.
    All CTAs of a column but its last publish a map for each channel, in memory that a further CTA zeroes."""
    columns, tiles = _columns(variant, problem), ceil_div(problem.time, times(variant))
    tiles_of_warp = ceil_div(tiles, max(1, min((resident - 1) // columns, tiles)))
    ctas = max(1, ceil_div(tiles, max(1, tiles_of_warp)))  # of a column
    run = tiles_of_warp * times(variant) // variant.number("warps")
    grid = columns // problem.batch, problem.batch
    if ctas == 1:
        return Launch((*grid, 1), problem.scalars(run))
    item = _WORD if ITEM_SIZE[problem.dtype] < 4 else 2 * _WORD
    published = columns * (ctas - 1) * scans(variant) * item
    return Launch((*grid, 1 + ctas), problem.scalars(run), HEAD + published, zeroed=False)


def _workspace(variant: Variant, problem: LinearScanProblem, segments: int) -> int:
    """Bytes of the head, where the counter is, and of the aggregates of segments and of groups. They lie in chunks of 16
    bytes, each of three words and a flag."""
    words = 2 if ITEM_SIZE[problem.dtype] == 8 else 1
    compensated = ITEM_SIZE[problem.dtype] >= 4
    of_map = ceil_div((3 if compensated else 2) * words, 3)
    across = 1 if problem.layout == "time_last" else scans(variant)
    return HEAD + 16 * across * (segments + segments // LEAST_GROUP) * of_map


def _columns(variant: Variant, problem: LinearScanProblem) -> int:
    """How many columns there are."""
    return problem.batch * max(1, problem.sequences) * ceil_div(problem.channels, scans(variant))


def _ctas_per_column(variant: Variant) -> int:
    """Blocks that share a column."""
    return int(dict(variant.statics).get("ctas_per_column", 1))


def _is_single_wave(variant: Variant) -> bool:
    """Whether many blocks read a column at once."""
    return "single_wave" in dict(variant.statics)


def descriptor_bytes(variant: Variant, blocks: int) -> int:
    """Bytes of a counter, and of a ring of tiles for each CTA with a descriptor for each channel."""
    turns = 2 * (variant.number("aggregate_lead") + 1)
    return COUNTER + blocks * turns * scans(variant) * _WORD


def exceeds_residency(variant: Variant, problem: LinearScanProblem, sm_count: int) -> str | None:
    """Why a GPU cannot hold all CTAs that share columns at once. Those that it holds would wait for ones that start
    only after them."""
    ctas = _ctas_per_column(variant)
    if ctas == 1 and not _is_single_wave(variant):
        return None
    columns = _columns(variant, problem)
    blocks, resident = columns * ctas, sm_count * variant.number("blocks")
    return (
        f"{blocks} blocks share {columns} columns, and {resident} run at once"
        if blocks > resident
        else None
    )


def _cuts(variant: Variant) -> bool:
    """Whether scans are cut into segments."""
    return "prefix_lead" in dict(variant.statics)


def _segments(variant: Variant, problem: LinearScanProblem) -> int:
    """The segments of all columns, for a variant that cuts them."""
    warps = rings.tile_warps(dict(variant.statics))
    of_column = ceil_div(_tiles_of_scan(variant, problem), warps)
    if problem.layout == "time_last":
        return problem.batch * problem.channels * of_column
    return problem.batch * ceil_div(problem.channels, scans(variant)) * of_column


def _tiles_of_scan(variant: Variant, problem: LinearScanProblem) -> int:
    """The tiles of a scan, for a variant that cuts scans."""
    if problem.layout == "time_last":
        return _tiles_of_row(variant, problem)
    return ceil_div(problem.time, times(variant))


def _tiles_of_row(variant: Variant, problem: LinearScanProblem) -> int:
    """Of contiguous time."""
    skips = takes_misaligned(variant)
    if variant.text("access") == VARLEN and problem.whole_chunks(problem.chunk()):
        skips = False  # the kernel finds out that rows are aligned
    skipped = LINE // ITEM_SIZE[problem.dtype] - 1 if skips else 0
    return ceil_div(problem.time + skipped, times(variant))
