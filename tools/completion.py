"""Write what shells complete the command line with: run it after a change of a command's arguments.

    python tools/completion.py

shtab reads the parsers of scan_registry.cli and writes a script for each shell into scan_registry/cli/completions. Wheels hold
these scripts, and ``scan-registry completion SHELL`` prints one, so that users need neither shtab nor another package.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import shtab

from scan_registry.cli import parser
from scan_registry.cli.completion import SHELLS

FOLDER = Path(__file__).resolve().parents[1] / "scan_registry" / "cli" / "completions"
#: Lines of shtab's bash script on where to put it, which is not where `scan-registry completion --help` says.
ELSEWHERE = r"^# (Usage:|1\)|2\)|   source|See also:).*\n"
#: What stands for a value that is a path, in usage lines.
PATHS = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "DIR": shtab.DIRECTORY}


def actions(of: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of its commands."""
    for action in of._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from actions(command)


def scripts() -> dict[Path, str]:
    """The script of each shell, by its file."""
    program = parser()
    for action in actions(program):
        if isinstance(action.metavar, str) and action.metavar in PATHS:
            action.complete = PATHS[action.metavar]  # type: ignore[attr-defined]
    unwanted = re.compile(rf"{ELSEWHERE}|[ \t]+$", re.MULTILINE)
    return {
        FOLDER / f"{shell}.txt": unwanted.sub("", shtab.complete(program, shell))
        for shell in SHELLS
    }


if __name__ == "__main__":
    for path, text in scripts().items():
        path.write_text(text, encoding="utf-8")
        print(path)
