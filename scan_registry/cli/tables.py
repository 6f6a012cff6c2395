"""Tables that stay whole: on a terminal of any width, in a pipe, in a file."""

from __future__ import annotations

import os

from rich import box
from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 120  # where there is no terminal to ask


def screen() -> Console:
    """Where a command prints. Numbers are not coloured: colour is for what went wrong."""
    console = Console(highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(highlight=False, width=_PIPED_WIDTH)


def new_table(*columns: str) -> Table:
    """An empty table. A column marked ``>`` holds numbers; one marked ``~`` wraps first."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(
            column.rstrip(">~"),
            justify="right" if column.endswith(">") else "left",
            no_wrap=not column.endswith("~"),
            overflow="fold",
        )
    return table


def show(console: Console, table: Table, *title: str) -> None:
    """Print a table; on a screen too narrow for it, fold its cells rather than crop any."""
    unlimited = console.options.update(width=10_000)
    if console.measure(table, options=unlimited).minimum > console.width:
        for column in table.columns:
            column.no_wrap = False
    console.print("", *title, table, sep="\n")
