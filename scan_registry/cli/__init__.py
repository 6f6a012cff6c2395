"""The command line: one module per command.

A command is a module with ``add_parser``, which declares its arguments, and ``run``, which returns
the exit status; its name on the command line is the module's. What a user can cause (a damaged
archive, a filter that names nothing, a device without a kernel) is one message on stderr and
status 2; anything else is a defect of this package and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Protocol

from scan_registry.artifact.archive import ArchiveError
from scan_registry.catalog.providers import ProviderError
from scan_registry.cli import bench, cache, doctor, explain, inspect, selftest, tune, verify
from scan_registry.cli.errors import UsageError
from scan_registry.cli.streams import make_plain
from scan_registry.dispatch.select import NoKernelError
from scan_registry.version import __version__

PROGRAM = "scan-registry"


class Command(Protocol):
    """What a command's module defines."""

    def add_parser(
        self, commands: argparse._SubParsersAction[argparse.ArgumentParser], /
    ) -> None: ...

    def run(self, args: argparse.Namespace, /) -> int: ...


COMMANDS: dict[str, Command] = {
    "inspect": inspect,
    "explain": explain,
    "doctor": doctor,
    "verify": verify,
    "selftest": selftest,
    "bench": bench,
    "tune": tune,
    "cache": cache,
}


def parser() -> argparse.ArgumentParser:
    """The program's arguments, with those of every command."""
    program = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Ahead-of-time compiled GPU kernels for scans: what is installed, and does it "
        "work here.",
    )
    program.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = program.add_subparsers(dest="command", metavar="command", title="commands")
    for command in COMMANDS.values():
        command.add_parser(commands)
    return program


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names (default: of this process) and return its exit status."""
    make_plain()
    program = parser()
    args = program.parse_args(argv)
    if args.command is None:
        program.print_help(sys.stderr)
        return 2
    # Torch's word where NumPy is not installed, which nothing here needs.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    try:
        return COMMANDS[args.command].run(args)
    except (ArchiveError, ProviderError, UsageError, NoKernelError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has gone; keep the interpreter's last flush from failing as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
