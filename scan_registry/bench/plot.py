"""A picture of timings: milliseconds over the length of the sequences, one panel for each pass."""

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

    One line for everyone who was timed, and a dashed one for the floor, at which the bytes stream.
    """
    figures = load()
    passes = list(dict.fromkeys(timing.direction for timing in timings))
    figure = figures.Figure(figsize=(6.4 * len(passes), 4.8), layout="constrained")
    for axes, direction in zip(
        figure.subplots(1, len(passes), squeeze=False)[0], passes, strict=True
    ):
        here = [timing for timing in timings if timing.direction == direction]
        floor = {timing.case.time: timing.floor_ms for timing in here}
        for who in dict.fromkeys(timing.who for timing in here):
            line = {timing.case.time: timing.ms for timing in here if timing.who == who}
            axes.plot(*_points(line), marker="o", label=who)
        axes.plot(*_points(floor), linestyle="--", color="gray", label="streaming")
        axes.set(title=direction, xlabel="sequence length", ylabel="ms")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path)


def _points(line: dict[int, float]) -> tuple[list[int], list[float]]:
    times = sorted(line)
    return times, [line[time] for time in times]
