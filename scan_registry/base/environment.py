"""What users say in environment variables."""

from __future__ import annotations

import os

_OFF = frozenset(("", "0", "false", "no", "off"))


def flag(name: str) -> bool:
    """Whether a variable turns something on: it is set, and to none of 0, false, no and off."""
    return os.environ.get(name, "").strip().lower() not in _OFF
