"""What the pictures of the documentation are drawn with: colours, and elements of an SVG.

Written out by hand, so that the same results give the same bytes wherever they are drawn.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

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

    def box(self, at: Point, width: float, height: float, color: str) -> None:
        """The outline of a rectangle with round corners."""
        self.elements.append(
            f'<rect x="{at[0]:.1f}" y="{at[1]:.1f}" width="{width:g}" height="{height:g}" rx="6" fill="none" '
            f'stroke="{color}" stroke-width="1.5"/>'
        )

    def arrow(self, start: Point, end: Point, color: str) -> None:
        """A line with a head, to the right or down."""
        (x, y), size = end, 6.0
        tips = (
            ((x - size, y - size), (x - size, y + size))
            if start[1] == y
            else ((x - size, y - size), (x + size, y - size))
        )
        self.line([start, end], color, width=1.5)
        self.line([tips[0], end, tips[1]], color, width=1.5)

    def heading(self, note: str = "") -> float:
        """The title and a note below it, in as many lines as they need; returns where the last line ends."""
        below = 28.0
        for words, size, bold in ((self.title, 15, True), (note, 12, False)):
            for row in wrapped(words, size * (1.1 if bold else 1), self.width - 40):
                color = "" if bold else self.palette.faint
                self.text((20, below), row, size=size, bold=bold, color=color)
                below += 20
        return below - 20

    def note(self, words: str) -> None:
        """Small text at the bottom."""
        rows = wrapped(words, 12, self.width - 40)
        for number, row in enumerate(reversed(rows)):
            below = self.height - 18 - 18 * number
            self.text((20, below), row, size=12, color=self.palette.faint)

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


def wrapped(words: str, size: float, width: float) -> list[str]:
    """Text cut into lines, by the width that characters have on average."""
    return textwrap.wrap(words, max(int(width / (0.58 * size)), 10))
