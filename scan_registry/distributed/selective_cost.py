"""A cost model of the schedules of a selective scan, and the choice between them.

A scan of few rows (batch · channels) is not limited by memory: a kernel works on the steps of a row one after another, and a
step takes as long with 5,120 rows as with 8,192. So the model of ``cost``, which counts bytes, does not hold here. The functions
are pure, and the module does not import torch. Times are in seconds.

    "reduce"  Forward every rank scans its part twice, in chunks of time that run at once. Backward nothing is done twice but
              the kernel ``adjoint``, and that only where rows are many.
    "pass"    Ranks pass states on, in pieces of channels. Pieces of fewer rows than fill a GPU gain nothing, so with few rows
              there is one piece, and the ranks run one after another.
    "mixed"   Forward "pass" in one piece, backward "reduce".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from scan_registry.distributed.cost import OPENING, time_in_words
from scan_registry.distributed.machines import Machine

SelectiveSchedule = Literal["local", "reduce", "pass", "mixed"]
Times = dict[SelectiveSchedule, float]

#: Seconds of an element of 16 states, forward and backward, on an H100 that is full. Where an SM has up to ``FULL`` CTAs of
#: ``CTA_ROWS`` rows, a forward step takes ``STEP`` seconds, and ``STEP_OF_CTA`` for each CTA. They come from 72 ns with two CTAs
#: and 124 ns with four, (1, 5120, 32768, 16) and (8, 2048, 4096, 16) of ``bench selective_scan`` in bfloat16
#: (kernels/selective_scan/notes). Other GPUs and dtypes have other times, and about the same ratios.
FORWARD, BACKWARD = 7.6e-12, 36e-12
STEP, STEP_OF_CTA, CTA_ROWS, FULL, SMS = 20e-9, 26e-9, 32, 4, 132
_STATES = 16
#: What the kernel ``adjoint`` adds to a backward pass that would run without it, and the rows from which on it would.
ADJOINT, MANY_ROWS = 0.2, 64 * 264
#: On the CPU and where no kernel fits a summary costs as much as the pass itself, and rows are not too few.
PLAIN_FORWARD, PLAIN_BACKWARD = 1e-9, 3e-9


@dataclass(frozen=True)
class SelectiveWork:
    """What the ranks of a group have to do.

    steps      time steps of each rank's part, in rank order
    rows       batch · channels
    states     of a channel
    itemsize   bytes of an element
    softplus   of the step sizes
    kernels    whether kernels for GPUs compute it
    recorded   whether a backward pass follows
    pieces     number of pieces of "pass"
    chunks     number of chunks of "reduce"
    """

    steps: tuple[int, ...]
    rows: int
    states: int
    itemsize: int
    softplus: bool = False
    kernels: bool = True
    recorded: bool = False
    pieces: int = 1
    chunks: int = 1

    @property
    def ranks(self) -> int:
        return len(self.steps)

    @property
    def passes(self) -> int:
        return 1 + self.recorded

    @property
    def state(self) -> int:
        """Bytes of a state of all rows."""
        return self.rows * self.states * max(4, self.itemsize)

    def forward(self, rows: float) -> float:
        """Seconds of a step."""
        scale = max(1.0, self.states / _STATES)
        if not self.kernels:
            return scale * rows * PLAIN_FORWARD
        ctas = ceil(rows / (CTA_ROWS * SMS))  # of the SM that has the most
        return scale * max(STEP + STEP_OF_CTA * min(ctas, FULL), rows * FORWARD)

    def backward(self, rows: float) -> float:
        scale = max(1.0, self.states / _STATES)
        return scale * rows * (BACKWARD if self.kernels else PLAIN_BACKWARD)

    @property
    def summed(self) -> int:
        """Bytes that move for each step to add up step sizes. With softplus torch's operators write and read float32 in between. A
        kernel reads step sizes once, but takes as long as three reads: 0.5 ms for 5,120 · 65,536 in bfloat16 on an H200."""
        if not self.softplus:
            return self.rows * self.itemsize
        return self.rows * (3 * self.itemsize if self.kernels else self.itemsize + 16)


def _passing(work: SelectiveWork, machine: Machine, step: float, copied: int) -> float:
    """Pieces whose step takes so long pass through all ranks, as in ``cost.pass_seconds``. Of several pieces, so many sequences
    are copied to where the whole is."""
    if work.pieces > 1:
        step += 2 * copied * work.itemsize * work.rows / work.pieces / machine.memory
    times = [steps * step + machine.piece for steps in work.steps]
    through = sum(times) + machine.passing(work.ranks, work.state / work.pieces)
    opening = machine.all_gather(work.ranks, OPENING)
    return opening + through + (work.pieces - 1) * max(times)


def _reduced(work: SelectiveWork, machine: Machine, local: float) -> float:
    few = machine.launch * (4 + 2 * work.chunks + work.ranks)
    return local + few + machine.all_gather(work.ranks, 2 * work.state)


def seconds(work: SelectiveWork, machine: Machine) -> Times:
    """The predicted time of each schedule that is possible, and of one rank with the whole sequence, "local"."""
    longest, rows = max(work.steps), work.rows
    total = sum(work.steps)
    twice = 2 * work.forward(rows * work.chunks) / work.chunks + work.summed / machine.memory
    share = (ADJOINT if rows >= MANY_ROWS else 0.0) if work.kernels else 1.0
    forward = {
        "local": total * work.forward(rows) + machine.launch,
        "reduce": _reduced(work, machine, longest * twice),
        "pass": _passing(work, machine, work.forward(rows / work.pieces), 1),
    }
    backward = dict.fromkeys(forward, 0.0)
    if work.recorded:
        backward = {
            "local": total * work.backward(rows) + machine.launch,
            "reduce": _reduced(work, machine, longest * work.backward(rows) * (1 + share)),
            "pass": _passing(work, machine, work.backward(rows / work.pieces), 3),
        }
    found: Times = {
        "local": forward["local"] + backward["local"],
        "reduce": forward["reduce"] + backward["reduce"],
        "pass": forward["pass"] + backward["pass"],
    }
    if work.kernels and work.pieces == 1 and work.recorded:
        found["mixed"] = forward["pass"] + backward["reduce"]
    return found


@dataclass(frozen=True)
class SelectiveChoice:
    """A schedule of ``selective_scan``, and the reasons for it.

    schedule  "reduce", "pass" or "mixed"; "local" where one rank has the whole sequence
    pieces    number of pieces of "pass"; 1 otherwise
    seconds   predicted time of this schedule
    times     predicted times of all schedules that are possible, and of one rank with the whole sequence, "local"
    machine   the machine that the predictions are made for
    reasons   the reasons in words
    """

    schedule: SelectiveSchedule
    pieces: int
    seconds: float
    times: Times
    machine: Machine
    reasons: tuple[str, ...]

    def as_given(self, schedule: SelectiveSchedule, pieces: int) -> SelectiveChoice:
        """This choice with the first rank's schedule, which every rank has to take."""
        why = f"the first rank takes {schedule}, and all go by it; by this rank's machine it would be {self.schedule}"
        there = self.times.get(schedule, self.seconds)
        reasons = (why, *self.reasons[1:])
        return replace(self, schedule=schedule, pieces=pieces, seconds=there, reasons=reasons)

    def __str__(self) -> str:
        head = (
            f"{self.schedule}, {self.pieces} pieces" if self.schedule == "pass" else self.schedule
        )
        return "\n  ".join([f"{head}: {time_in_words(self.seconds)} predicted", *self.reasons])


def choose(work: SelectiveWork, machine: Machine, schedule: str = "auto") -> SelectiveChoice:
    """The schedule with the shortest predicted time, or ``schedule`` where it is not "auto"."""
    times = seconds(work, machine)
    if work.ranks == 1:
        why = "one rank has the whole sequence, so nothing is exchanged"
        return SelectiveChoice("local", 1, times["local"], times, machine, (why,))
    order: tuple[SelectiveSchedule, ...] = ("reduce", "mixed", "pass")
    best = min((each for each in order if each in times), key=lambda each: times[each])
    chosen = next((each for each in order if each == schedule), best)
    if schedule == "auto":
        why = f"{chosen} has the shortest predicted time"
    elif chosen == best:
        why = f"{chosen} was given, and is what auto would take"
    else:
        less = time_in_words(times[chosen] - times[best])
        why = f"{chosen} was given; auto would take {best}, which is {less} shorter"
    longest = max(work.steps)
    share = work.forward(work.rows * work.chunks) / work.chunks
    said = {
        "reduce": f"{work.chunks} chunks of time at once: forward {longest:,} steps of {time_in_words(share)}, "
        f"twice, and {time_in_words(longest * work.summed / machine.memory)} to add up step sizes",
        "mixed": "forward as pass, backward as reduce",
        "pass": f"{work.pieces} pieces of {work.rows / work.pieces:,.0f} rows: forward "
        f"{sum(work.steps):,} steps of {time_in_words(work.forward(work.rows / work.pieces))} in a row",
        "local": f"one rank with all {sum(work.steps):,} steps",
    }
    if work.pieces > 1:
        said["pass"] = (
            f"{work.pieces} pieces of {work.rows / work.pieces:,.0f} rows, the longest part of {longest:,} steps"
        )
    each = (f"{name}: {time_in_words(times[name])}, {said[name]}" for name in times)
    reasons = (why, *each, f"model of {machine.name} ({machine.source})")
    pieces = work.pieces if chosen == "pass" else 1
    return SelectiveChoice(chosen, pieces, times[chosen], times, machine, reasons)
