"""How much a new process does, in calls of functions: the same in every run and on every machine, unlike its time."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import contextlib, io, sys
calls = 0
def count(frame, event, _):
    global calls
    calls += event in ("call", "c_call")
words = sys.argv[1:]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    sys.setprofile(count)
    import scan_registry
    if words:
        from scan_registry.cli import main
        main(words)
sys.setprofile(None)
print(calls)
"""


def calls_of(*words: str) -> int:
    """The calls of Python's and of C functions that a command makes in a process of its own; of no words, an import."""
    command = [sys.executable, "-c", _SCRIPT, *words]
    done = subprocess.run(command, cwd="/", check=True, capture_output=True)
    return int(done.stdout)
