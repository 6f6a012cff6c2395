"""What a user got wrong on the command line."""

from __future__ import annotations

INTERRUPTED = 130  # the exit status, as shells report a program that Ctrl-C ended


class UsageError(ValueError):
    """An argument that cannot be meant; the message names it and what is accepted."""
