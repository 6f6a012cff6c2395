"""What a user got wrong on the command line."""

from __future__ import annotations

# Exit statuses, as shells report a program that Ctrl-C ended, or that wrote into a pipe which nobody reads.
INTERRUPTED, CLOSED_PIPE = 130, 141


class UsageError(ValueError):
    """An argument that cannot be meant; the message names it and what is accepted."""
