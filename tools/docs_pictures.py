"""The pictures of the documentation, drawn as SVG from tools/results: each tells one thing.

Written out by hand, so that the same results give the same bytes wherever they are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any
from xml.sax.saxutils import escape

import docs_results as results

Point = tuple[float, float]


@dataclass(frozen=True)
class Palette:
    """Colours by what they are for."""

    paper: str
    ink: str
    faint: str
    grid: str
    ours: str
    others: tuple[str, ...]


PALETTES = {
    "light": Palette("#ffffff", "#1f2933", "#5b6770", "#dde3e8", "#00796b", ("#c2410c", "#7c3aed")),
    "dark": Palette("#1e2129", "#e5e7eb", "#a3adb8", "#3a404c", "#4db6ac", ("#fb923c", "#a78bfa")),
}


@dataclass
class Canvas:
    """Elements of an SVG, in pixels."""

    width: float
    height: float
    palette: Palette
    title: str
    elements: list[str] = field(default_factory=list)

    def text(
        self, at: Point, words: str, *, anchor: str = "start", size: int = 13, color: str = "",
        bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self.elements.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" font-size="{size}"{weight} '
            f'fill="{color or self.palette.ink}">{escape(words)}</text>'
        )

    def line(
        self, points: Sequence[Point], color: str, *, width: float = 1, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.elements.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"{dash}/>'
        )

    def bar(self, at: Point, width: float, height: float, color: str) -> None:
        """A rectangle to the right of and below ``at``, at least a line wide."""
        self.elements.append(
            f'<rect x="{at[0]:.1f}" y="{at[1]:.1f}" width="{max(width, 1.5):.1f}" height="{height:g}" fill="{color}"/>'
        )

    def dots(self, points: Iterable[Point], color: str) -> None:
        self.elements += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points
        ]

    def svg(self) -> str:
        """The whole document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        )
        paper = f'<rect width="100%" height="100%" fill="{self.palette.paper}"/>'
        body = [head, f"<title>{escape(self.title)}</title>", paper, *self.elements, "</svg>"]
        return "\n".join(body) + "\n"


def log_scale(least: float, most: float, start: float, end: float) -> Callable[[float], float]:
    """A function from values to pixels, by their logarithms."""
    low, high = math.log(least), math.log(most)
    return lambda value: start + (math.log(value) - low) / (high - low) * (end - start)


def short(value: float) -> str:
    """A number as an axis shows it."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


# --- Time against length ----------------------------------------------------------------------


def time_against_length(palette: Palette) -> Canvas:
    """One layout: ours, what else was measured, and the bandwidth roofline."""
    title = "Scan of (8, 1536, T) bfloat16, time contiguous: milliseconds against length"
    canvas = Canvas(760, 410, palette, title)
    canvas.text((20, 28), title, size=15, bold=True)
    canvas.text(
        (20, 48), f"both axes logarithmic; {results.of_run('h100-bench')}", color=palette.faint
    )
    for number, direction in enumerate(("forward", "backward")):
        timings = [
            timing
            for timing in results.timings(
                "h100-bench", layout="time_last", batch=8, channels=1536, dtype="bfloat16"
            )
            if timing["direction"] == direction
        ]
        _lengths(canvas, 20 + 370 * number, timings, direction)
    return canvas


def _lengths(canvas: Canvas, left: float, timings: Sequence[dict[str, Any]], name: str) -> None:
    palette = canvas.palette
    lengths = sorted({timing["case"]["time"] for timing in timings})
    x = log_scale(lengths[0], lengths[-1], left + 48, left + 335)
    y = log_scale(0.004, 2.5, 350, 90)
    for tick in (0.01, 0.1, 1.0):
        canvas.line([(left + 48, y(tick)), (left + 335, y(tick))], palette.grid)
        canvas.text((left + 42, y(tick) + 4), short(tick), anchor="end", color=palette.faint)
    for length in lengths:
        canvas.text((x(length), 370), f"{length:,}", anchor="middle", size=12, color=palette.faint)
    canvas.text((left + 48, 80), name, bold=True)
    canvas.text((left + 190, 392), "length T", anchor="middle", size=12, color=palette.faint)
    lines = {
        "scan-registry": ("scan-registry", palette.ours),
        "accelerated-scan": ("accelerated-scan", palette.others[0]),
        "torch associative_scan": ("torch associative_scan", palette.others[1]),
    }
    labels = []
    roofline = [
        (x(t), y(min(e["roofline_ms"] for e in timings if e["case"]["time"] == t))) for t in lengths
    ]
    for who, (label, color) in lines.items():
        points = []
        for length in lengths:
            best = results.quickest([e for e in timings if e["case"]["time"] == length], who)
            if best is not None:
                points.append((x(length), y(best["ms"])))
        if points:
            canvas.line(points, color, width=2.5)
            canvas.dots(points, color)
            labels.append((label, color))
    canvas.line(roofline, palette.ink, width=1.5, dashed=True)
    labels.append(("bandwidth roofline (dashed)", palette.ink))
    for number, (label, color) in enumerate(labels):
        canvas.text((left + 64, 112 + 18 * number), label, color=color, bold=color != palette.ink)


# --- A model of characters --------------------------------------------------------------------


def character_model(palette: Palette) -> Canvas:
    """Losses of the two models of the tutorial, each point a mean over ten steps."""
    record = results.document("cpu-character-model")
    title = "Predicting the next character: loss against the steps of training"
    canvas = Canvas(760, 400, palette, title)
    canvas.text((20, 28), title, size=15, bold=True)
    said = f"cross-entropy in nats, means over ten steps; {results.of_run('cpu-character-model')}"
    canvas.text((20, 48), said, color=palette.faint, size=12)
    left, right, top, bottom = 60.0, 730.0, 76.0, 346.0
    curves = {
        run["network"]: [fmean(run["losses"][i : i + 10]) for i in range(0, len(run["losses"]), 10)]
        for run in record["runs"]
    }
    values = [value for curve in curves.values() for value in curve]
    low, high = math.floor(2 * min(values)) / 2, math.ceil(2 * max(values)) / 2
    steps = max(len(run["losses"]) for run in record["runs"])

    def point(step: float, loss: float) -> Point:
        along, down = step / steps, (high - loss) / (high - low)
        return left + along * (right - left), top + down * (bottom - top)

    for half in range(round(2 * low), round(2 * high) + 1):
        at = point(0, half / 2)
        canvas.line([at, point(steps, half / 2)], palette.grid)
        canvas.text((left - 8, at[1] + 4), f"{half / 2:.1f}", anchor="end", color=palette.faint)
    for step in range(0, steps + 1, 50):
        x = point(step, low)[0]
        canvas.text((x, bottom + 18), str(step), anchor="middle", size=12, color=palette.faint)
    canvas.text(((left + right) / 2, bottom + 40), "steps", anchor="middle", color=palette.faint)
    colors = (palette.ours, palette.others[0])
    for number, (name, curve) in enumerate(curves.items()):
        color = colors[number]
        canvas.line([point(10 * i + 5, loss) for i, loss in enumerate(curve)], color, width=2.5)
        label = f"{name}, at the end {curve[-1]:.2f}"
        canvas.text((right, top + 14 + 20 * number), label, anchor="end", color=color, bold=True)
    return canvas


# --- A model of transformers ------------------------------------------------------------------


def mamba2_training(palette: Palette) -> Canvas:
    """A step of transformers' Mamba2 on each path, and the first one, which includes what is compiled."""
    record = results.document(results.MAMBA2)
    layers, width, (batch, time) = record["size"][1], record["size"][0], record["shape"]
    title = f"transformers' Mamba2, {layers} layers of {width:,} features, on ({batch}, {time:,}) tokens"
    canvas = Canvas(760, 250, palette, title)
    canvas.text((20, 28), title, size=15, bold=True)
    said = f"milliseconds of a training step in {record['dtype']}; {results.of_run(results.MAMBA2)}"
    canvas.text((20, 48), said, color=palette.faint, size=12)
    colors = dict(zip(results.PATHS, (*palette.others, palette.ours), strict=True))
    panels = {"training step": "a step", "first training step": "the first step, compiling included"}  # fmt: skip
    for number, (what, heading) in enumerate(panels.items()):
        left, times = 190.0 + 285 * number, results.of_model(what)
        canvas.text((left, 80), heading, bold=True)
        for row, (path, ms) in enumerate(times.items()):
            top = 94.0 + 38 * row
            long = 185 * ms / max(times.values())
            canvas.bar((left, top), long, 24, colors[path])
            canvas.text((left + long + 8, top + 17), results.milliseconds(ms), color=colors[path], bold=True)  # fmt: skip
            if number == 0:
                label = results.PATHS[path]
                canvas.text((left - 10, top + 17), label, anchor="end", color=colors[path])
    if results.convolution_is_ours():
        note = (
            "mamba_ssm's path has scan-registry's convolution, as causal-conv1d was not installed"
        )
        canvas.text((20, 232), note, color=palette.faint, size=12)
    return canvas


PICTURES: Mapping[str, Callable[[Palette], Canvas]] = {
    "time-against-length": time_against_length,
    "character-model": character_model,
    "mamba2-training": mamba2_training,
}


def files() -> dict[str, str]:
    """Every picture in both palettes, by the name of its file."""
    return {
        f"{name}-{shade}.svg": draw(palette).svg()
        for name, draw in PICTURES.items()
        for shade, palette in PALETTES.items()
    }
