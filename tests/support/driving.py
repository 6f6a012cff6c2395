"""Scripts that run against the stub driver, in processes of their own: a process opens one driver and keeps it."""

from __future__ import annotations

import json
from textwrap import dedent
from typing import Any

#: What every script starts with. Its arguments name the files of ``images``.
PRELUDE = """
import ctypes, json, sys, threading
from pathlib import Path
from scan_registry.hardware import driver
from scan_registry.hardware._launcher import Launch

images = [Path(argument).read_bytes() for argument in sys.argv[1:]]

def load(ordinal=0, shared=0, image=0):
    context = driver.primary_context(ordinal)
    return driver.load(context, images[image], "kernel", shared, "a kernel")

def launch(function, ordinal=0, **changes):
    return Launch(**{
        "context": driver.primary_context(ordinal), "function": function, "grid": (7, 2, 1),
        "block": (128, 1, 1), "shared": 0, "pointers": 2, "scalars": (5,), "hidden": 1,
        "workspace": -1, "workspace_bytes": 0, **changes,
    })

def current():
    context = ctypes.c_void_p()
    driver.library().cuCtxGetCurrent(ctypes.byref(context))
    return context.value

def make_current(ordinal):
    context = ctypes.c_void_p(driver.primary_context(ordinal))
    assert driver.library().cuCtxSetCurrent(context) == 0

def failure(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return {"type": type(error).__name__, "words": str(error),
                "status": getattr(error, "status", None)}

# The results of a call in threads where no context, that of device 0 and that of device 1 is
# current, each with whether it still was so afterwards.
def with_each_context(call):
    results = []
    def work(ordinal):
        if ordinal is not None:
            make_current(ordinal)
        context = current()
        results.append((call(), context == current()))
    for ordinal in (None, 0, 1):
        thread = threading.Thread(target=work, args=(ordinal,))
        thread.start()
        thread.join()
    return results

"""


def play(stub: Any, script: str, *images: bytes) -> Any:
    """Run a script after the prelude; what it prints, from JSON."""
    paths = [stub.folder / f"image{number}" for number in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        path.write_bytes(image)
    return json.loads(stub.run(PRELUDE + dedent(script), *paths).stdout)


def assert_balanced(stub: Any) -> None:
    """Every thread has taken back every context that it pushed."""
    depth: dict[tuple[int, int], int] = {}
    for call in stub.calls("cuCtxPushCurrent", "cuCtxPopCurrent"):
        if call.status == 0:
            thread = (call.process, call.thread)
            depth[thread] = depth.get(thread, 0) + (1 if "Push" in call.name else -1)
            assert depth[thread] >= 0
    assert not any(depth.values())
