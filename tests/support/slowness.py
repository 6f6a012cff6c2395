"""How slow this machine is, for tests that limit a time."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache

#: A new process that fills some 60 MB with small objects, and the seconds that it takes at most on an ordinary machine. In
#: virtual machines whose memory the host gives out page by page it takes up to 20 times as long, and so does any command.
_WORK = "found = [{'a': i, 'b': str(i), 'c': [i, i + 1]} for i in range(200_000)]"
_USUAL = 0.3


@cache
def slowness() -> float:
    """What limits are to be multiplied by: 1 on an ordinary machine."""
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", _WORK], check=True, cwd="/")
        taken.append(time.perf_counter() - started)
    return max(1.0, min(taken) / _USUAL)
