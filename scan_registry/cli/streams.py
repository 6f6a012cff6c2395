"""Output that is written whole, whatever characters its encoding has.

Where there is no such character, a plain one of the same meaning stands in for it. That concerns a terminal
or a pipe in ASCII or latin-1, and paths that are not UTF-8.
"""

from __future__ import annotations

import codecs
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any

_HANDLER = "scan_registry.plain"
#: Those of handlers that Python chooses by itself; a user's own choice stays.
_USUAL = ("strict", "surrogateescape", "backslashreplace")
_PLAIN = {
    "–": "-",
    "—": "-",
    "−": "-",
    "…": "...",
    "·": "*",
    "•": "*",
    "×": "x",
    "±": "+-",
    "µ": "u",
    "μ": "u",
    "→": "->",
    "←": "<-",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "‖": "||",
    "√": "sqrt",
    "²": "^2",
    "³": "^3",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "\N{NO-BREAK SPACE}": " ",
}


def plain(character: str) -> str:
    """ASCII that means the same, or the character's number."""
    if (
        "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
        <= character
        <= "\N{BOX DRAWINGS HEAVY UP AND LIGHT DOWN}"
    ):
        return "|" if character in "│┃║╎╏┆┇┊┋" else "-" if character in "─━═╌╍┄┅┈┉╴╶╸╺╼╾" else "+"
    known = _PLAIN.get(character)
    return character.encode("ascii", "backslashreplace").decode() if known is None else known


def _handle(error: UnicodeError) -> tuple[str | bytes, int]:
    """One character at a time, by the rules of ``codecs.register_error``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    number = ord(character) - 0xDC00
    if 0x80 <= number <= 0xFF:  # how Python holds a byte of a path that is no text
        return bytes((number,)), error.start + 1
    return plain(character), error.start + 1


def make_plain() -> None:
    """Have this process's output and error stream replace what they cannot encode."""
    codecs.register_error(_HANDLER, _handle)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors in _USUAL:
            stream.reconfigure(errors=_HANDLER)


def complain(text: str) -> None:
    """Print a message on stderr: one line, which a terminal's width folds between words."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)
    print(text, file=sys.stderr)


class Output:
    """A stream that remembers why it could not be written: argparse passes over such errors, and of others it is not
    known that they are the stream's."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """As the stream does."""
        return int(self._tried(self.stream.write, text))

    def flush(self) -> None:
        """As the stream does."""
        self._tried(self.stream.flush)

    def finish(self) -> None:
        """Write what is left, and raise what has failed."""
        self.flush()
        if self.failure is not None:
            raise self.failure

    def _tried(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            self.failure = error
            raise

    def discard(self) -> None:
        """Have the stream go nowhere, or the interpreter's last flush would fail as an earlier one has."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)
