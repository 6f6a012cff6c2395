"""The pictures of the documentation, drawn as SVG: each tells one thing.

Each has a wide form and a narrow one, for screens of 360 pixels. Charts are drawn from tools/results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import docs_results as results
from docs_canvas import PALETTES, Canvas, Palette, Point, log_scale, short

from scan_registry.hardware.target import RELEASED

#: Pixels of the two forms.
WIDE, NARROW = 760.0, 360.0


# --- What the package is ----------------------------------------------------------------------

#: GPUs of each archive of the default wheel.
SUCH_AS = {
    "sm80": "A100, A30",
    "sm86": "RTX 30, A10",
    "sm89": "RTX 40, L4",
    "sm90": "H100, H200",
    "sm100": "B200",
    "sm120": "RTX 50",
    "ptx80": "other GPUs",
}
#: What the picture shows as chosen.
_CHOSEN = "sm90"


def package(palette: Palette, width: float = WIDE) -> Canvas:
    """The wheel, its archives, and what a call takes of them."""
    narrow = width < WIDE
    title = "One wheel has compiled kernels for every supported GPU"
    canvas = Canvas(width, 500 if narrow else 318, palette, title)
    below = canvas.heading("nothing compiles on your machine where an archive fits the GPU")
    top = below + 20
    boxes = 300.0 if narrow else 270.0
    canvas.box((20, top), boxes, 32 + 28 * len(RELEASED) + 8, palette.ink)
    canvas.text((34, top + 22), "pip install scan-registry", bold=True)
    chosen = top
    for number, label in enumerate(RELEASED):
        row = top + 34 + 28 * number
        color = palette.ours if label == _CHOSEN else palette.faint
        canvas.box((34, row), boxes - 28, 23, color)
        canvas.text((44, row + 16), f"archive {label}", color=color, bold=label == _CHOSEN)
        canvas.text((20 + boxes - 24, row + 16), SUCH_AS[label], anchor="end", color=color)
        chosen = row + 11.5 if label == _CHOSEN else chosen
    bottom = top + 40 + 28 * len(RELEASED)
    if narrow:
        canvas.arrow((170, bottom), (170, bottom + 34), palette.ours)
        canvas.text((182, bottom + 22), "chosen by the GPU", color=palette.ours)
        _call(canvas, (20, bottom + 40), 300)
    else:
        canvas.arrow((20 + boxes, chosen), (440, chosen), palette.ours)
        canvas.text((300, chosen - 10), "chosen by the GPU", color=palette.ours)
        _call(canvas, (446, chosen - 54), 294)
    return canvas


def _call(canvas: Canvas, at: Point, width: float) -> None:
    """What runs on an H100."""
    palette, (left, top) = canvas.palette, at
    canvas.box(at, width, 108, palette.ours)
    canvas.text((left + 14, top + 26), "scan_registry.linear_scan(…)", bold=True)
    for number, words in enumerate(
        ("1. choose a binary for the call", "2. check its digest", "3. launch it on the H100")
    ):
        canvas.text((left + 14, top + 50 + 21 * number), words, color=palette.ink)


# --- Time against length ----------------------------------------------------------------------


def time_against_length(palette: Palette, width: float = WIDE) -> Canvas:
    """One layout: ours, what else was measured, and the bandwidth roofline."""
    narrow = width < WIDE
    title = "Scan of (8, 1536, T) bfloat16, time contiguous: milliseconds against length"
    canvas = Canvas(width, 800 if narrow else 410, palette, title)
    below = canvas.heading(f"both axes logarithmic; {results.of_run('h100-bench')}")
    for number, direction in enumerate(("forward", "backward")):
        timings = [
            timing
            for timing in results.timings(
                "h100-bench", layout="time_last", batch=8, channels=1536, dtype="bfloat16"
            )
            if timing["direction"] == direction
        ]
        corner = (0.0, below - 60 + 330 * number) if narrow else (20.0 + 370 * number, 0.0)
        _lengths(canvas, corner, timings, direction)
    return canvas


def _lengths(canvas: Canvas, corner: Point, timings: Sequence[dict[str, Any]], name: str) -> None:
    palette, (left, top) = canvas.palette, corner
    lengths = sorted({timing["case"]["time"] for timing in timings})
    x = log_scale(lengths[0], lengths[-1], left + 48, left + 335)
    y = log_scale(0.004, 2.5, top + 350, top + 90)
    for tick in (0.01, 0.1, 1.0):
        canvas.line([(left + 48, y(tick)), (left + 335, y(tick))], palette.grid)
        canvas.text((left + 42, y(tick) + 4), short(tick), anchor="end", color=palette.faint)
    for length in lengths:
        canvas.text(
            (x(length), top + 370), f"{length:,}", anchor="middle", size=12, color=palette.faint
        )
    canvas.text((left + 48, top + 80), name, bold=True)
    canvas.text((left + 190, top + 392), "length T", anchor="middle", size=12, color=palette.faint)
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
        canvas.text(
            (left + 64, top + 112 + 18 * number), label, color=color, bold=color != palette.ink
        )


# --- A model of characters --------------------------------------------------------------------


def character_model(palette: Palette, width: float = WIDE) -> Canvas:
    """Losses of the two models of the tutorial, each point a mean over ten steps."""
    record = results.document("cpu-character-model")
    title = "Predicting the next character: loss against the steps of training"
    canvas = Canvas(width, 440 if width < WIDE else 400, palette, title)
    note = f"cross-entropy in nats, means over ten steps; {results.of_run('cpu-character-model')}"
    left, right, top = 60.0, width - 30, canvas.heading(note) + 28
    bottom = canvas.height - 54
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
    for step in range(0, steps + 1, 100 if width < WIDE else 50):
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


def mamba2_training(palette: Palette, width: float = WIDE) -> Canvas:
    """A step of transformers' Mamba2 on each path, and the first one, which includes what is compiled."""
    record = results.document(results.MAMBA2)
    narrow = width < WIDE
    layers, features, (batch, time) = record["size"][1], record["size"][0], record["shape"]
    title = f"transformers' Mamba2, {layers} layers of {features:,} features, on ({batch}, {time:,}) tokens"
    canvas = Canvas(width, 580 if narrow else 250, palette, title)
    below = canvas.heading(
        f"milliseconds of a training step in {record['dtype']}; {results.of_run(results.MAMBA2)}"
    )
    panels = {"training step": "a step", "first training step": "the first step, compiling included"}  # fmt: skip
    for number, (what, heading) in enumerate(panels.items()):
        left = 20.0 if narrow else 190.0 + 285 * number
        top = below + 32 + (176 * number if narrow else 0)
        canvas.text((left, top), heading, bold=True)
        _paths(canvas, (left, top + 14), results.of_model(what), labels=narrow or number == 0)
    if results.convolution_is_ours():
        note = (
            "mamba_ssm's path has scan-registry's convolution, as causal-conv1d was not installed"
        )
        canvas.note(note)
    return canvas


def _paths(canvas: Canvas, at: Point, times: Mapping[str, float], *, labels: bool) -> None:
    """A bar for each path. Its label stands to the left of the bar, on a narrow canvas above it."""
    narrow, palette = canvas.width < WIDE, canvas.palette
    colors = dict(zip(results.PATHS, (*palette.others, palette.ours), strict=True))
    for row, (path, ms) in enumerate(times.items()):
        left, top = at[0], at[1] + (48 * row + 18 if narrow else 38 * row)
        long = (240 if narrow else 185) * ms / max(times.values())
        color, height = colors[path], 20 if narrow else 24
        canvas.bar((left, top), long, height, color)
        beside = (left + long + 8, top + height - 7)
        canvas.text(beside, results.milliseconds(ms), color=color, bold=True)
        if labels:
            place = (left, top - 6) if narrow else (left - 10, beside[1])
            anchor = "start" if narrow else "end"
            canvas.text(place, results.PATHS[path], anchor=anchor, color=color)


PICTURES: Mapping[str, Callable[[Palette, float], Canvas]] = {
    "package": package,
    "time-against-length": time_against_length,
    "character-model": character_model,
    "mamba2-training": mamba2_training,
}


def files() -> dict[str, str]:
    """Every picture in both forms and both palettes, by the name of its file."""
    return {
        f"{name}{form}-{shade}.svg": draw(palette, width).svg()
        for name, draw in PICTURES.items()
        for form, width in (("", WIDE), ("-narrow", NARROW))
        for shade, palette in PALETTES.items()
    }
