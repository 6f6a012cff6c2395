"""``scan-registry completion``: what a shell completes the command line with."""

from __future__ import annotations

import argparse
from pathlib import Path

#: The shells, and where each looks for a script when it starts.
SHELLS = {
    "bash": "~/.local/share/bash-completion/completions/scan-registry",
    "zsh": "~/.zfunc/_scan-registry",
    "fish": "~/.config/fish/completions/scan-registry.fish",
}


def script(shell: str) -> str:
    """The script for a shell, which is part of the package."""
    path = Path(__file__).parent / "completions" / f"{shell}.txt"
    return path.read_text(encoding="utf-8")


DESCRIPTION = (
    "Prints a script with which a shell completes commands and options. Write it to a file "
    "that the shell reads: "
    + ", ".join(f"{place} ({shell})" for shell, place in SHELLS.items())
    + ". For zsh the folder has to be in fpath before compinit runs."
)
EPILOG = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that is to read it")


def run(args: argparse.Namespace) -> int:
    print(script(args.shell), end="")
    return 0
