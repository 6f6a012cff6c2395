"""Calls that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(*calls: Callable[[], None]) -> None:
    """Run each in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
