"""Programs that tests start."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Any


def captured(
    command: Iterable[object], *, check: bool = False, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """A command's exit status, and what it printed. ``settings`` are those of ``subprocess.run``."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, encoding="utf-8", check=check, **settings
    )
