"""Tables with one line for each row. In a pipe or a file they are whole; on a narrow terminal columns are left
out."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_UNLIMITED = 100_000  # columns, of what is no terminal
_GAP, _NARROW_GAP = "  ", " "
#: What a line's text comes after: spaces, and a label that two spaces or more end, or an arrow.
_START = re.compile(r" *(?:→ |\S+  +)?")


def on_terminal() -> bool:
    """Whether output goes to a terminal, and not into a pipe or a file."""
    return sys.stdout.isatty()


def screen() -> Console:
    """Where a command prints. Numbers are not coloured: colour is for what went wrong."""
    # Imported by what prints: --help needs none of it.
    from rich.console import Console

    size = shutil.get_terminal_size()
    width = size.columns if on_terminal() else _UNLIMITED

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            """Leave it to the program, where rich would end the process with status 1."""
            raise BrokenPipeError

    # Without a height, rich takes terminals that know no colours for 80 columns wide.
    return Screen(highlight=False, width=width, height=size.lines)


class Table:
    """Rows of cells, which may hold rich's markup and are one line each.

    ranks say which columns have their place first where there is no room for all: those of the lowest,
    and of equals the leftmost; those of rank 0 stay whatever the room.
    """

    def __init__(self, names: Sequence[str], right: Sequence[bool], ranks: Sequence[int]) -> None:
        self.names, self.right, self.ranks = names, right, ranks
        self.rows: list[Sequence[str]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row with a cell for each column."""
        assert len(cells) == len(self.names), cells
        self.rows.append(cells)

    def fits(self, width: int) -> bool:
        """Whether the columns that have to stay have their usual distance in a line so wide."""
        from rich.text import Text

        columns = zip(self.ranks, self.names, *self.rows, strict=True)
        staying = [cells for rank, *cells in columns if not rank]
        widths = [max(Text.from_markup(cell).cell_len for cell in cells) for cells in staying]
        return sum(widths) + len(_GAP) * (len(widths) - 1) <= width

    def lines(self, width: int) -> tuple[list[Text], list[str]]:
        """The lines, no wider than that, and the columns that went for it. If columns that have to stay are wider, they
        are closer together, and what is still too wide is cut and ends in ``…``."""
        from rich.text import Text

        rows = [[Text.from_markup(cell) for cell in row] for row in self.rows]
        head = [Text(name) for name in self.names]
        widths = [max(cell.cell_len for cell in column) for column in zip(head, *rows, strict=True)]
        kept = list[int]()
        for rank, n in sorted((rank, n) for n, rank in enumerate(self.ranks)):
            if not rank or sum(widths[k] + len(_GAP) for k in kept) + widths[n] <= width:
                kept.append(n)
        kept.sort()
        gap = _GAP if self.fits(width) else _NARROW_GAP

        def line(cells: Sequence[Text]) -> Text:
            placed = []
            for n in kept:
                pad = " " * (widths[n] - cells[n].cell_len)
                placed.append(Text(pad) + cells[n] if self.right[n] else cells[n] + Text(pad))
            joined = Text(gap).join(placed)
            joined.rstrip()
            joined.truncate(width, overflow="ellipsis")
            return joined

        whole = sum(widths[n] for n in kept) + len(gap) * (len(kept) - 1)
        rule = Text("─" * min(whole, width))
        gone = [name for n, name in enumerate(self.names) if n not in kept]
        return [line(head), rule, *map(line, rows)], gone


def new_table(*columns: str) -> Table:
    """An empty table. A column marked ``>`` holds numbers; one marked ``?`` goes before others where
    there is no room; one marked ``!`` stays, as the first does."""
    names = [column.rstrip(">?!~") for column in columns]
    marks = [column[len(name) :] for column, name in zip(columns, names, strict=True)]
    ranks = [
        0 if "!" in mark or not number else 2 if "?" in mark else 1
        for number, mark in enumerate(marks)
    ]
    return Table(names, [">" in mark for mark in marks], ranks)


def show(console: Console, table: Table, *title: str) -> None:
    """Print a table, and on a terminal that is too narrow for it, which columns are left out."""
    lines, gone = table.lines(console.width)
    console.print("", *title, sep="\n")
    for line in lines:
        console.print(line, soft_wrap=True)
    if gone:
        text = f"(no room here for {', '.join(gone)}: widen the terminal, or pipe into a pager)"
        say(console, text, "dim")


def say(console: Console, text: str, style: str = "") -> None:
    """Print text, whose lines a terminal's width folds between words and nothing folds in a pipe."""
    lines = [part for line in text.split("\n") for part in folded(line, console.width)]
    console.print("\n".join(lines), markup=False, emoji=False, style=style, soft_wrap=True)


def folded(line: str, width: int) -> list[str]:
    """The line in parts no wider than that. All but the first start below the text of the first, after its label
    or arrow; below a line without a label, that is indented, two columns further in."""
    if len(line) <= width:
        return [line]
    start = _START.match(line)
    assert start is not None
    indent = len(start[0]) + 2 * (bool(start[0]) and not start[0].strip())
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * min(indent, width // 2),
        break_on_hyphens=False,
    )


def by_reason(skipped: Mapping[str, str]) -> dict[str, list[str]]:
    """What was skipped, by reason."""
    subjects: dict[str, list[str]] = {}
    for subject, reason in skipped.items():
        subjects.setdefault(reason, []).append(subject)
    return subjects
