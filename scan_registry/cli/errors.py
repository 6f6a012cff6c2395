"""What a user got wrong on the command line."""

from __future__ import annotations


class UsageError(ValueError):
    """An argument that cannot be meant; the message names it and what is accepted."""
