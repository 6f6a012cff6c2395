"""Recorded graphs, without a GPU."""

from __future__ import annotations

import sys

from forked import captured

#: At the end of a process Python replaces what a module holds by None, and objects in cycles outlive that.
SCRIPT = """
import scan_registry.ops.recording as recording
graph = recording.Graph(0, 1)
for name in [name for name in vars(recording) if not name.startswith("__")]:
    setattr(recording, name, None)
del graph
"""


def test_a_graph_that_outlives_its_module_says_nothing() -> None:
    done = captured([sys.executable, "-c", SCRIPT], check=True, cwd="/")
    assert done.stderr == ""
