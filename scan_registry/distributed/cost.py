"""A cost model of the two schedules, and the choice between them.

A sequence lies on several ranks, each with a contiguous part of time. Both schedules bring to each rank the state before
its part:

"reduce"  Each rank reads gates and tokens once to compute its summary: the product of its gates, and the last state of a
          scan that starts from zero. One all-gather exchanges the summaries, two values for each channel. Then each rank
          scans from the right state. The inputs are read twice: forward moves 5 tensors through memory in place of 3,
          and backward 7 in place of 5.
"pass"    Each rank scans its channels in pieces. A piece begins when the state before it has come from the previous
          rank, and the piece's last state goes to the next rank. Nothing is read twice. But the last rank waits until
          the first piece has passed through all others: with N ranks and P pieces, the time of N − 1 pieces is lost.

The model counts the time of GPUs, memory and links, and the CPU's time for pieces of "pass". It leaves out the CPU's time for
the rest of a call. All functions of this module are pure: the same numbers give the same results on every rank. Times are in
seconds, and sizes in bytes. The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scan_registry.distributed.machines import Machine

Schedule = Literal["local", "reduce", "pass"]
SCHEDULES: tuple[Literal["reduce", "pass"], ...] = ("reduce", "pass")
Direction = Literal["forward", "backward", "both"]
TENSORS: Mapping[Direction, int] = {"forward": 3, "backward": 5, "both": 8}  # that a scan moves
MOST_PIECES = 64  # of "pass"; the CPU launches each of them
#: The channels of a piece are a multiple of this many bytes at each time step, so that kernels read whole 128-byte lines
#: where channels are contiguous.
LINE = 128
#: The least time of a time step, in seconds, of a scan on a GPU with contiguous channels. A tile of time steps needs the state
#: that leaves the tile before, so a scan of few channels does not get the memory's bandwidth. Measured for 256 channels and
#: 524,288 steps in bfloat16 on an H200; "both" is the sum.
CHAIN: Mapping[Direction, float] = {"forward": 0.5e-9, "backward": 0.8e-9, "both": 1.3e-9}
#: Bytes of a rank's header, in the all-gather that compares the ranks' arguments before "pass" sends states. "reduce" sends
#: the header together with the summary.
OPENING = 4096


@dataclass(frozen=True)
class Work:
    """What the ranks of a group have to do.

    steps    time steps of each rank's part, in rank order
    summary  bytes that a summary moves for each time step
    scan     bytes that the scan itself moves for each time step
    state    bytes of one state of all channels
    lines    number of equal units of channels; "pass" does not cut inside a unit
    passes   number of passes over the sequence: 2 for forward and backward, over which ``summary``, ``scan`` and ``chain`` are
             sums
    chain    the least time of a time step, in seconds
    """

    steps: tuple[int, ...]
    summary: float
    scan: float
    state: float
    lines: int = MOST_PIECES
    passes: int = 1
    chain: float = 0.0

    def __post_init__(self) -> None:
        if not self.steps or min(self.steps) < 0:
            raise ValueError(f"steps are {self.steps}; a group has one number, 0 or more, a rank")
        if self.lines < 1:
            raise ValueError(f"lines are {self.lines}; there is 1 at least")

    @property
    def ranks(self) -> int:
        return len(self.steps)

    @property
    def most(self) -> int:
        """The largest number of pieces."""
        return min(MOST_PIECES, self.lines)

    def pieces(self, wanted: int) -> int:
        """The actual number of pieces if ``wanted`` are asked for. All pieces but the last have the same number of lines."""
        return -(-self.lines // -(-self.lines // wanted))


def even(total: int, ranks: int) -> tuple[int, ...]:
    """The lengths of parts of ``total`` steps that differ by at most one step."""
    least, more = divmod(total, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


def linear_scan_work(
    steps: Sequence[int],
    rows: int,
    itemsize: int,
    *,
    direction: Direction = "forward",
    channels: int | None = None,
    chained: bool = False,
) -> Work:
    """The work of ``linear_scan``.

    Forward reads gates and tokens and writes states; backward reads gates, states and the incoming gradient and writes
    two gradients. A summary reads two tensors.

    direction "forward", "backward", or "both" passes
    rows      batch × channels
    itemsize  bytes of an element; ranks exchange states in 4 bytes for each element, or 8 for float64 and complex64
    channels  size of the dimension that is cut into pieces; all rows unless given
    chained   whether a GPU scans a sequence whose channels are contiguous; a time step then takes at least ``CHAIN``
    """
    moved = rows * itemsize
    lines = max(1, -(-(rows if channels is None else channels) // line_of(itemsize)))
    tensors = TENSORS[direction]
    passes = 2 if direction == "both" else 1
    return Work(
        steps=tuple(steps),
        summary=2 * passes * moved,
        scan=tensors * moved,
        state=rows * max(4, itemsize),
        lines=lines,
        passes=passes,
        chain=CHAIN[direction] if chained else 0.0,
    )


def line_of(itemsize: int) -> int:
    """The number of elements in ``LINE`` bytes."""
    return max(1, LINE // itemsize)


def piece_width(channels: int, pieces: int, itemsize: int) -> int:
    """Channels of each piece but the last, if ``pieces`` are wanted: whole lines, unless there are fewer lines than pieces."""
    line = line_of(itemsize)
    if pieces > -(-channels // line):
        line = 1
    return line * max(1, -(-channels // (line * pieces)))


# --- Times ------------------------------------------------------------------------------------


def _step(work: Work, machine: Machine, pieces: int = 1) -> float:
    """Seconds in which a rank scans a time step of one of so many pieces."""
    return max(work.scan / machine.memory / pieces, work.chain)


def one_rank_seconds(work: Work, machine: Machine) -> float:
    """The time of one rank that scans the whole sequence by itself."""
    return work.passes * machine.launch + sum(work.steps) * _step(work, machine)


def reduce_seconds(work: Work, machine: Machine) -> float:
    """The time of "reduce": the longest part's summary, an all-gather of the summaries, reading all ranks' summaries, and
    the longest part's scan. On one rank it is the time of the scan alone."""
    if work.ranks == 1:
        return one_rank_seconds(work, machine)
    longest, gathered = max(work.steps), 2 * work.state
    read = longest * work.summary + work.passes * work.ranks * gathered
    exchange = 3 * machine.launch + machine.all_gather(work.ranks, gathered)
    return read / machine.memory + longest * _step(work, machine) + work.passes * exchange


def pass_seconds(work: Work, machine: Machine, pieces: int) -> float:
    """The time of "pass" with this number of pieces.

    The ranks form a pipeline: the first piece passes through every rank, and the other pieces follow it at the pace of
    the slowest rank. An all-gather precedes the pipeline, in which the ranks compare their arguments.
    """
    if pieces < 1:
        raise ValueError(f"pieces are {pieces}; there is 1 at least")
    if work.ranks == 1:
        return one_rank_seconds(work, machine)
    fixed, step = work.passes * machine.piece, _step(work, machine, pieces)
    times = [steps * step + fixed for steps in work.steps]
    through = sum(times) + work.passes * machine.passing(work.ranks, work.state / pieces)
    opening = work.passes * machine.all_gather(work.ranks, OPENING)
    return opening + through + (pieces - 1) * max(times)


def best_pieces(work: Work, machine: Machine) -> int:
    """The number of pieces with which "pass" takes the shortest time.

    Let V be the seconds in which the whole sequence's bytes move through memory, M those of the longest part, S the seconds
    of the messages' bytes, and o the fixed cost of a piece. The terms that depend on the number of pieces P are
    (V − M + S) / P + o · P. If P could be any number, the best would be √((V − M + S) / o), unless pieces then had so few
    channels that ``chain`` limits them.
    """
    counts = sorted({work.pieces(wanted) for wanted in range(1, work.most + 1)})
    return min(counts, key=lambda count: pass_seconds(work, machine, count))


# --- The choice -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A schedule, and the reasons for it.

    schedule        "reduce" or "pass"; "local" where one rank has the whole sequence
    pieces          number of pieces of "pass"; 1 otherwise
    seconds         predicted time of this schedule
    reduce_seconds  predicted time of "reduce"
    pass_seconds    predicted time of "pass", with the best number of pieces or the given one
    alone_seconds   predicted time of one rank with the whole sequence
    machine         the machine that the predictions are made for
    reasons         the reasons in words
    """

    schedule: Schedule
    pieces: int
    seconds: float
    reduce_seconds: float
    pass_seconds: float
    alone_seconds: float
    machine: Machine
    reasons: tuple[str, ...]

    def as_given(self, pieces: int) -> Choice:
        """This choice with the first rank's schedule, which every rank has to take. ``pieces`` is the first rank's number of
        pieces of "pass", or 0 for "reduce"."""
        chosen: Schedule = "pass" if pieces else "reduce"
        why = f"the first rank takes {chosen}, and all go by it; by this rank's machine it would be {self.schedule}"
        seconds = self.pass_seconds if pieces else self.reduce_seconds
        return replace(
            self,
            schedule=chosen,
            pieces=max(1, pieces),
            seconds=seconds,
            reasons=(why, *self.reasons[1:]),
        )

    def __str__(self) -> str:
        head = (
            f"{self.schedule}, {self.pieces} pieces" if self.schedule == "pass" else self.schedule
        )
        return "\n  ".join([f"{head}: {time_in_words(self.seconds)} predicted", *self.reasons])


def choose(
    work: Work, machine: Machine, schedule: str = "auto", pieces: int | None = None
) -> Choice:
    """The schedule with the shorter predicted time, or ``schedule`` where it is not "auto".

    pieces  wanted number of pieces of "pass"; ``best_pieces`` unless given

    Ranks with the same work and the same machine choose the same schedule. ``ValueError`` for an unknown schedule, and for
    more pieces than ``work.most``.
    """
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"schedule is {schedule!r}; accepted are auto, {', '.join(SCHEDULES)}")
    if pieces is not None and not 1 <= pieces <= work.most:
        raise ValueError(f"pieces are {pieces}; the channels here can be cut into 1 to {work.most}")
    alone = one_rank_seconds(work, machine)
    if work.ranks == 1:
        why = "one rank has the whole sequence, so nothing is exchanged"
        return Choice("local", 1, alone, alone, alone, alone, machine, (why,))
    number = best_pieces(work, machine) if pieces is None else work.pieces(pieces)
    reduced, passed = reduce_seconds(work, machine), pass_seconds(work, machine, number)
    chosen: Schedule = "reduce" if reduced <= passed else "pass"
    if schedule != "auto":
        chosen = "pass" if schedule == "pass" else "reduce"
    reasons = (
        _why(chosen, schedule, reduced, passed),
        _why_reduce(work, machine, reduced),
        _why_pass(work, machine, number, passed),
        f"one rank with all {sum(work.steps):,} steps: {time_in_words(alone)}",
        f"model of {machine.name} ({machine.source})",
    )
    seconds = reduced if chosen == "reduce" else passed
    return Choice(
        *(chosen, number if chosen == "pass" else 1, seconds, reduced, passed, alone, machine),
        reasons,
    )


def _why(chosen: str, schedule: str, reduced: float, passed: float) -> str:
    if schedule == "auto":
        return f"{chosen} has the shorter predicted time"
    other, difference = (
        ("pass", passed - reduced) if chosen == "reduce" else ("reduce", reduced - passed)
    )
    if difference >= 0:
        return f"{chosen} was given, and is what auto would take"
    return f"{chosen} was given; auto would take {other}, which is {time_in_words(-difference)} shorter"


def _why_reduce(work: Work, machine: Machine, seconds: float) -> str:
    longest = max(work.steps)
    return (
        f"reduce: {time_in_words(seconds)}, of which {time_in_words(longest * work.summary / machine.memory)} read the summary of "
        f"{longest:,} steps, {time_in_words(work.passes * machine.all_gather(work.ranks, 2 * work.state))} gather "
        f"{work.ranks} × {2 * work.state:,.0f} bytes, and {time_in_words(longest * _step(work, machine))} scan"
    )


def _why_pass(work: Work, machine: Machine, pieces: int, seconds: float) -> str:
    step = _step(work, machine, pieces)
    scan = max(work.steps) * step * pieces
    others = (sum(work.steps) - max(work.steps)) * step
    return (
        f"pass: {time_in_words(seconds)} in {pieces} of at most {work.most} pieces, of which {time_in_words(scan)} scan, "
        f"{time_in_words(others)} wait for the first piece of the other ranks, "
        f"{time_in_words(work.passes * machine.passing(work.ranks, work.state / pieces))} pass states on, "
        f"{time_in_words(work.passes * machine.all_gather(work.ranks, OPENING))} compare the calls, and "
        f"{time_in_words(work.passes * (work.ranks - 1 + pieces) * machine.piece)} are the cost of pieces"
    )


def time_in_words(seconds: float) -> str:
    """Three digits, in µs or ms."""
    return f"{seconds * 1e6:.3g} µs" if seconds < 999.5e-6 else f"{seconds * 1e3:.4g} ms"
