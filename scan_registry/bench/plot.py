"""A picture of timings over the length of the sequences: above milliseconds, below the fraction of the
floor's speed; a column of panels for each pass."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scan_registry.bench.measure import Timing

FORMATS = ("pdf", "png", "svg")


class PlotError(RuntimeError):
    """There is no matplotlib; the message says how to get it."""


def load() -> Any:
    """matplotlib's ``figure``, or ``PlotError``."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotError(
            f"a plot needs matplotlib, which does not import here ({error}); "
            "pip install 'scan-registry[plot]' brings it"
        ) from error


def draw(timings: Sequence[Timing], title: str, path: Path) -> None:
    """Write the picture to ``path``, in the format that its suffix names.

    One line for everyone who was timed on each kind of case, cases that differ in time alone; where
    there is one kind, a dashed one for the floor, at which the bytes stream.
    """
    figures = load()
    passes = list(dict.fromkeys(timing.direction for timing in timings))
    figure = figures.Figure(figsize=(6.4 * len(passes), 9.6), layout="constrained")
    above, below = figure.subplots(2, len(passes), squeeze=False)
    kinds = list(dict.fromkeys(map(_kind, timings)))
    for column, direction in enumerate(passes):
        here = [timing for timing in timings if timing.direction == direction]
        _panel(above[column], here, kinds, direction)
        _panel(below[column], here, kinds, f"{direction}, of the floor", fraction=True)
        if len(kinds) == 1:
            floor = {timing.case.time: timing.floor_ms for timing in here}
            above[column].plot(*_points(floor), linestyle="--", color="gray", label="streaming")
        for axes in (above[column], below[column]):
            axes.legend(fontsize="small" if len(kinds) == 1 else "xx-small")
    figure.suptitle(title)
    figure.savefig(path)


def _panel(
    axes: Any, here: Sequence[Timing], kinds: Sequence[str], title: str, *, fraction: bool = False
) -> None:
    for kind in kinds:
        of_kind = [timing for timing in here if _kind(timing) == kind]
        for who in dict.fromkeys(timing.who for timing in of_kind):
            line = {
                timing.case.time: timing.floor_ms / timing.ms if fraction else timing.ms
                for timing in of_kind
                if timing.who == who
            }
            label = who if len(kinds) == 1 else f"{kind}, {who}"
            axes.plot(*_points(line), marker="o", label=label)
    axes.set(title=title, xlabel="sequence length", ylabel="floor / time" if fraction else "ms")
    axes.set_xscale("log", base=2)
    if fraction:
        axes.set_ylim(0, 1.1)
    else:
        axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)


def _kind(timing: Timing) -> str:
    """What cases of one line have in common."""
    case = timing.case
    words = [case.layout, f"{case.batch} × {case.channels}", case.dtype, case.options]
    return ", ".join(word for word in words if word)


def _points(line: dict[int, float]) -> tuple[list[int], list[float]]:
    times = sorted(line)
    return times, [line[time] for time in times]
