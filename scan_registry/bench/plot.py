"""A picture of timings. Where the memory bounds kernels, lines over the length of the sequences: above
milliseconds, below the fraction of the roofline's speed, and a column of panels for each pass. Else bars for each
case: microseconds of a step, and a panel for each pass."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scan_registry.bench.measure import Bench
from scan_registry.ops.benchmark import Timing

FORMATS = ("pdf", "png", "svg")
_LEGEND_INCHES = 5.0  # beside the panels, where many kinds have to be told apart
_STYLES = {
    "float32": "-",
    "bfloat16": "--",
    "float16": ":",
    "float64": "-.",
    "complex64": (0, (5, 1, 1, 1, 1, 1)),
}


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


def draw(bench: Bench, path: Path) -> None:
    """Write the picture to ``path``, in the format that its suffix names."""
    if not bench.benchmark.streams:
        levels = {name: value for name, value in bench.facts.items() if value is not None}
        return draw_bars(bench.timings, bench.name, levels, path)
    kinds = {str(_kind(timing)) for timing in bench.timings}
    title = f"{bench.name}: {kinds.pop()}" if len(kinds) == 1 else bench.name
    return draw_lines(bench.timings, title, path)


def draw_bars(
    timings: Sequence[Timing], title: str, levels: Mapping[str, float], path: Path
) -> None:
    """Microseconds of a step: a bar for everyone, and a line across for each of ``levels``."""
    passes = list(dict.fromkeys(timing.direction for timing in timings))
    names = list(dict.fromkeys(str(timing.case) for timing in timings))
    everyone = list(dict.fromkeys(timing.who for timing in timings))
    figure: Any = load().Figure(
        figsize=(2 + 1.2 * max(4, len(names)), 4.2 * max(1, len(passes))), layout="constrained"
    )
    panels = figure.subplots(max(1, len(passes)), 1, squeeze=False)[:, 0]
    width = 0.8 / max(1, len(everyone))
    for panel, direction in zip(panels, passes, strict=False):
        for number, who in enumerate(everyone):
            here = [t for t in timings if (t.direction, t.who) == (direction, who)]
            places = [names.index(str(t.case)) + number * width for t in here]
            panel.bar(places, [t.us_per_step for t in here], width, label=who)
        for name, level in levels.items():
            panel.axhline(level, linestyle="--", color="gray", label=name)
        panel.set(title=direction, ylabel="µs per step")
        panel.set_xticks([n + 0.4 - width / 2 for n in range(len(names))], names, rotation=20)
        panel.legend(fontsize="x-small")
    figure.suptitle(title)
    figure.savefig(path)


def draw_lines(timings: Sequence[Timing], title: str, path: Path) -> None:
    """One line for everyone who was timed on each kind of case, cases that differ in time alone; where
    there is one kind, a dashed one for the roofline, at which the bytes stream. Of several kinds, lines
    that differ in the dtype alone have one colour.
    """
    figures = load()
    passes = list(dict.fromkeys(timing.direction for timing in timings))
    kinds = list(dict.fromkeys(map(_kind, timings)))
    lines = dict.fromkeys((_kind(timing).group, timing.who) for timing in timings)
    colors = {line: f"C{number}" for number, line in enumerate(lines)}
    beside = _LEGEND_INCHES if len(kinds) > 1 else 0.0
    figure = figures.Figure(figsize=(6.4 * len(passes) + beside, 9.6), layout="constrained")
    above, below = figure.subplots(2, len(passes), squeeze=False)
    for column, direction in enumerate(passes):
        here = [timing for timing in timings if timing.direction == direction]
        _panel(above[column], here, kinds, colors, direction)
        _panel(below[column], here, kinds, colors, f"{direction}, of the roofline", fraction=True)
        if len(kinds) == 1:
            roofline = {timing.case.time: timing.roofline_ms or 0.0 for timing in here}
            above[column].plot(*_points(roofline), linestyle="--", color="gray", label="streaming")
            above[column].legend()
            below[column].legend()
    if len(kinds) > 1:
        handles, labels = above[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize="x-small")
    figure.suptitle(title)
    figure.savefig(path)


def _panel(
    axes: Any,
    here: Sequence[Timing],
    kinds: Sequence[_Kind],
    colors: Mapping[tuple[str, str], str],
    title: str,
    *,
    fraction: bool = False,
) -> None:
    for kind in kinds:
        of_kind = [timing for timing in here if _kind(timing) == kind]
        for who in dict.fromkeys(timing.who for timing in of_kind):
            line = {
                timing.case.time: (timing.roofline_ms or 0.0) / timing.ms if fraction else timing.ms
                for timing in of_kind
                if timing.who == who
            }
            if len(kinds) == 1:
                axes.plot(*_points(line), marker="o", label=who)
            else:
                look = {"color": colors[kind.group, who], "linestyle": _STYLES[kind.dtype]}
                axes.plot(*_points(line), marker=".", label=f"{kind}, {who}", **look)
    axes.set(title=title, xlabel="sequence length", ylabel="roofline / time" if fraction else "ms")
    axes.set_xscale("log", base=2)
    if fraction:
        axes.set_ylim(0, 1.1)
    else:
        axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)


class _Kind(NamedTuple):
    """What cases of one line have in common; ``group`` is that without the dtype."""

    group: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.group}, {self.dtype}"


def _kind(timing: Timing) -> _Kind:
    return _Kind(timing.case.group, timing.case.dtype)


def _points(line: dict[int, float]) -> tuple[list[int], list[float]]:
    times = sorted(line)
    return times, [line[time] for time in times]
