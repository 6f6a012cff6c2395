"""The documentation's table and picture of a sequence on many ranks, by the cost model: no number of them is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import distributed_model as model
from docs_pictures import PALETTES, Canvas, Palette, log_scale, short

from scan_registry.distributed.machines import MACHINES

MACHINE = MACHINES["nvlink"]
#: A sequence whose training needs more than the 80 GB of an H100, and parts of the same length.
WHOLE = model.LongSequence(2048, 1 << 22)
EACH = model.LongSequence(2048, 1 << 16, each=True)
SHOWN = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


# --- The table --------------------------------------------------------------------------------


def table_rows(sequence: model.LongSequence) -> list[list[str]]:
    """One for each number of ranks: both passes, with the time of each schedule; that which auto takes is bold."""
    found = model.rows(sequence, MACHINE, SHOWN)
    rows = []
    for forward, backward in zip(found[::2], found[1::2], strict=True):
        row = [str(forward["ranks"]), f"{forward['steps']:,}"]
        for each in (forward, backward):
            times = {"reduce": f"{each['reduce_ms']:.3f}", "pass": f"{each['pass_ms']:.3f}"}
            times[each["auto"]] = f"**{times[each['auto']]}**"
            row += [times["reduce"], times["pass"], str(each["pieces"]), f"{each['speedup']:.1f}"]
        rows.append(row)
    return rows


HEAD = ("ranks", "steps a rank", *("forward: reduce, ms", "pass, ms", "pieces", "times one GPU"),
        *("backward: reduce, ms", "pass, ms", "pieces", "times one GPU"))  # fmt: skip


# --- The picture ------------------------------------------------------------------------------


def scaling(palette: Palette) -> Canvas:
    """Both schedules against the number of ranks: one sequence, and as many steps on each rank."""
    title = "Scan of one sequence with 2048 channels, bfloat16, forward: milliseconds against ranks"
    canvas = Canvas(760, 430, palette, title)
    canvas.text((20, 28), title, size=15, bold=True)
    said = f"modelled, not measured; both axes logarithmic; {MACHINE.name}, nodes of {MACHINE.ranks_per_node}"
    canvas.text((20, 48), said, color=palette.faint)
    panels = (
        (20, WHOLE, f"{WHOLE.time:,} steps in all"),
        (390, EACH, f"{EACH.time:,} steps on each rank"),
    )
    for left, sequence, name in panels:
        forward = model.rows(sequence, MACHINE)[::2]
        _panel(canvas, left, forward, name, one=not sequence.each)
    return canvas


def _panel(
    canvas: Canvas, left: float, found: Sequence[dict[str, Any]], name: str, one: bool
) -> None:
    palette = canvas.palette
    times = [each[key] for each in found for key in ("reduce_ms", "pass_ms")]
    ideal = [each["one_rank_ms"] / each["ranks"] for each in found]
    least, most = min([*times, *ideal]) / 1.5, max(times) * 2.5
    x = log_scale(found[0]["ranks"], found[-1]["ranks"], left + 52, left + 335)
    y = log_scale(least, most, 370, 90)
    for tick in (0.01, 0.1, 1.0, 10.0, 100.0):
        if least <= tick <= most:
            canvas.line([(left + 52, y(tick)), (left + 335, y(tick))], palette.grid)
            canvas.text((left + 46, y(tick) + 4), short(tick), anchor="end", color=palette.faint)
    for each in found[::2] + found[-1:]:
        at = (x(each["ranks"]), 390)
        canvas.text(at, f"{each['ranks']:,}", anchor="middle", size=12, color=palette.faint)
    canvas.text((left + 52, 80), name, bold=True)
    canvas.text((left + 190, 412), "ranks", anchor="middle", size=12, color=palette.faint)
    labels = (("reduce", palette.ours), ("pass", palette.others[0]))
    for number, (schedule, color) in enumerate(labels):
        points = [(x(each["ranks"]), y(each[f"{schedule}_ms"])) for each in found]
        canvas.line(points, color, width=2.5)
        canvas.dots(points, color)
        canvas.text((left + 64, 106 + 18 * number), schedule, color=color, bold=True)
    canvas.line(
        [(x(each["ranks"]), y(ms)) for each, ms in zip(found, ideal, strict=True)],
        palette.ink, width=1.5, dashed=True,
    )  # fmt: skip
    label = "one GPU's time / ranks" if one else "the scan alone"
    canvas.text((left + 64, 142), f"{label} (dashed)")


def files() -> dict[str, str]:
    """The picture in both palettes, by the name of its file."""
    return {
        f"distributed-model-{shade}.svg": scaling(palette).svg()
        for shade, palette in PALETTES.items()
    }
