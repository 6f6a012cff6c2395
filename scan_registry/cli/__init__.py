"""The command line: one module per command.

A command is a module with ``add_arguments``, which declares its arguments, and ``run``, which returns
the exit status; its name on the command line is the module's. Only the module of the command that is
called is imported. What a user can cause (a damaged archive, a filter that names nothing, a device
without a kernel) is one message on stderr and status 2; anything else is a defect of this package and
keeps its traceback. Ctrl-C is status 130, a pipe that nobody reads any more 141, and other output that cannot be
written one message and status 1.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from scan_registry.base.environment import check_flags
from scan_registry.cli.errors import CLOSED_PIPE, INTERRUPTED, UsageError
from scan_registry.cli.parsing import PROGRAM, Commands, Parser
from scan_registry.cli.streams import Output, complain, make_plain
from scan_registry.version import __version__

if TYPE_CHECKING:
    import argparse


class Command(Protocol):
    """What a command's module defines: what its help says before the arguments and behind them, and these."""

    DESCRIPTION: str | None
    EPILOG: str | None

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def run(self, args: argparse.Namespace, /) -> int: ...


#: What each command is for, by its name.
COMMANDS: Mapping[str, str] = {
    "inspect": "list the installed kernels",
    "explain": "say what a call would run, and why",
    "doctor": "say what runs on a GPU, what does not, and what would help",
    "verify": "check what is installed; compile it again and compare",
    "selftest": "run every kernel here and compare it with the float64 reference",
    "bench": "time kernels here, beside installed baselines and the memory's speed",
    "tune": "find the fastest variants on a GPU here, and use them from then on",
    "cache": "what was compiled and tuned here: list, clear, export",
    "completion": "print a script with which bash, zsh or fish completes commands",
}
#: Packages that a command may lack, and what it does with them.
_NEEDED: Mapping[str, str] = {
    "rich": "prints with rich",
    "torch": "needs torch, also where kernels are called from JAX",
}
#: Words in a command's place that stand for an option.
_SPOKEN: Mapping[str, str] = {
    "help": "the help of the command whose name follows, or this one",
    "version": "this program's version",
}


def command(name: str) -> Command:
    """The module of a command, imported now."""
    return cast(Command, import_module(f"{__name__}.{name}"))


def parser(words: Sequence[str] | None = None) -> Parser:
    """The program's arguments, with those of every command; given the words of a call, with those of the
    command in it alone."""
    program = Parser(
        prog=PROGRAM,
        description="Ahead-of-time compiled GPU kernels for scans and recurrences: what is installed, "
        "and does it work here.",
    )
    version = f"{PROGRAM} {__version__}"
    program.add_argument("-V", "--version", action="version", version=version)
    commands = program.add_subparsers(dest="command", metavar="command", title="commands")
    assert isinstance(commands, Commands)
    commands.summaries = {**COMMANDS, **_SPOKEN}
    called = None if words is None else next((word for word in words if word[:1] != "-"), "")
    for name in COMMANDS:
        if called in (None, name):
            own = command(name)
            own.add_arguments(
                commands.add_parser(name, description=own.DESCRIPTION, epilog=own.EPILOG)
            )
        else:
            commands.add_parser(name)
    for name, purpose in _SPOKEN.items():
        spoken = commands.add_parser(name, description=f"Shows {purpose}.")
        if name == "help":
            spoken.add_argument("words", nargs="*", metavar="command", help="such as cache list")
    return program


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names (default: of this process) and return its exit status."""
    if sys.stdout is None:  # its file descriptor is closed
        return _unwritten("it is closed")
    make_plain()
    output = Output(sys.stdout)
    try:
        with redirect_stdout(cast(TextIO, output)):
            return _to_the_end(sys.argv[1:] if argv is None else argv, output)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError:
        failure = output.failure
        if failure is None:
            raise
        output.discard()
        if isinstance(failure, BrokenPipeError):  # the reader (head, less) has gone
            return CLOSED_PIPE
        return _unwritten(failure.strerror or str(failure))


def _to_the_end(words: Sequence[str], output: Output) -> int:
    """The command's exit status, once all that it has printed is written."""
    try:
        status = _main(words)
    except SystemExit:
        output.finish()
        raise
    output.finish()
    return status


def _unwritten(reason: str) -> int:
    """Say that standard output takes nothing, and return the exit status for it."""
    complain(f"{PROGRAM}: error: standard output cannot be written: {reason}")
    return 1


def _main(words: Sequence[str]) -> int:
    words = _as_options(words)
    program = parser(words)
    args = program.parse_args(words)
    if args.command is None:
        program.print_help(sys.stderr)
        return 2
    # Torch warns of this if NumPy is not installed. Nothing here needs NumPy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    try:
        check_flags()
    except ValueError as error:
        complain(f"{PROGRAM}: error: {error}")
        return 2
    try:
        return command(args.command).run(args)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        complain(f"{PROGRAM}: error: this command {_NEEDED[missing]}; `pip install {missing}`")
        return 2
    except Exception as error:
        if not isinstance(error, _caused_by_users()):
            raise
        complain(f"{PROGRAM}: error: {error}")
        return 2


def _as_options(words: Sequence[str]) -> Sequence[str]:
    """The words with ``help cache list`` as ``cache list --help``, and ``version`` as ``--version``."""
    first, rest = words[:1], words[1:]
    if "help" in first:
        return [*rest, "--help"]
    return ["--version"] if "version" in first and not rest else words


def _caused_by_users() -> tuple[type[Exception], ...]:
    # Imported when something has failed: whatever raised one of these has imported it before.
    from scan_registry.artifact.archive import ArchiveError
    from scan_registry.catalog.providers import ProviderError
    from scan_registry.dispatch.select import NoKernelError
    from scan_registry.kernels import FamilyNameError

    return ArchiveError, ProviderError, UsageError, NoKernelError, FamilyNameError
