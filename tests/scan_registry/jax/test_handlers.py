"""The handlers that XLA calls, without XLA: what they read, look up, launch and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[2] / "support"
#: Calls handlers of a process of its own, since a process has one resolver.
PRELUDE = f"""
import ctypes, hashlib, json, sys, threading
sys.path.insert(0, {str(SUPPORT)!r})
from xla_frames import INITIALIZE, STREAM, Xla
from scan_registry.hardware import _launcher, driver

resolved = []
def attributes(text):
    return {{"key": hashlib.sha256(text.encode()).hexdigest(), "call": text}}
"""


def printed(stub: Any, script: str) -> Any:
    return json.loads(stub.run(PRELUDE + script).stdout)


def test_a_function_for_cpus(stub_driver: Any) -> None:
    """It is resolved once for each text, and called with the addresses of its buffers; an exception becomes XLA's error."""
    script = """
calls = []
def function(*arguments):
    calls.append(arguments)
    if arguments[0] == "bad":
        raise ValueError("not so")
def resolve(text, ordinal):
    resolved.append((text, ordinal))
    if text == "unknown":
        raise KeyError(text)
    places = (1, None, -1) if text != "far" else (2,)
    return function, places, (text,), ("after",), 16
on_cpu, on_gpu = _launcher.xla_handlers(resolve)
xla = Xla()
run = lambda text, *buffers: xla.call(on_cpu, buffers, (64,), attributes(text))
messages = [run("good", 16, 32), run("good", 48, 80), run("bad", 16, 32), run("far", 16, 32),
            run("good", 16, 24), run("unknown", 16, 32)]
messages.append(xla.call(on_cpu, (), (), {"key": "short", "call": ""}))
print(json.dumps([messages, calls, resolved, xla.metadata(on_cpu), xla.metadata(on_gpu)]))
"""
    messages, calls, resolved, of_cpu, of_gpu = printed(stub_driver, script)
    assert messages == [
        None,
        None,
        "ValueError: not so",
        "the call has fewer buffers than its kernel",
        "a buffer is aligned less than its kernel was chosen for",
        "KeyError: 'unknown'",
        "the attributes key and call are missing",
    ]
    assert calls == [
        ["good", [32, None, 64], "after"],
        ["good", [80, None, 64], "after"],
        ["bad", [32, None, 64], "after"],
    ]
    assert resolved == [["good", -1], ["bad", -1], ["far", -1], ["unknown", -1]]
    assert of_cpu == [0, 3, 0]
    assert of_gpu == [0, 3, 1]  # may be recorded into a CUDA graph


def test_a_launch(stub_driver: Any) -> None:
    """It gets XLA's stream, pointers before scalars and hidden nulls, and a workspace that is zeroed on the stream. Each
    device has its own; a device that initialises launches nothing."""
    script = """
seen = []
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
                  ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)), ctypes.c_void_p)
def launched(function, gx, gy, gz, bx, by, bz, shared, stream, values, extra):
    seen.append([function, [gx, gy, gz], [bx, by, bz], shared, stream, [values[i][0] for i in range(6)]])
    return 719 if function == 66 else 0
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
def zeroed(pointer, value, size, stream):
    seen.append(["zero", pointer, value, size, stream])
    return 0
library = driver.library()
address = lambda function: ctypes.cast(function, ctypes.c_void_p).value
others = [address(getattr(library, n)) for n in ("cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")]
_launcher.bind(address(launched), address(zeroed), *others)

def resolve(text, ordinal):
    resolved.append((text, ordinal))
    launch = _launcher.Launch(driver.primary_context(ordinal), 66 if text == "fails" else 7 + ordinal, (3, 2, 1),
                              (64, 1, 1), 5, 3, (11, 12), 1, 2, 256)
    return launch, (0, None, -1), (), (), 16
on_cpu, on_gpu = _launcher.xla_handlers(resolve)
first, second = Xla(0), Xla(1)
messages = [
    first.call(on_gpu, (4096,), (8192,), attributes("one"), INITIALIZE),
    first.call(on_gpu, (4096,), (8192,), attributes("one")),
    second.call(on_gpu, (4096,), (8192,), attributes("one")),
    first.call(on_gpu, (4096,), (8192,), attributes("fails")),
    Xla(0, 0, newest=False).call(on_gpu, (4096,), (8192,), attributes("one")),
]
print(json.dumps([messages, seen, resolved, STREAM]))
"""
    stub_driver.gpu().gpu()
    messages, seen, resolved, stream = printed(stub_driver, script)
    assert messages[:3] == [None, None, None]
    assert messages[3] == "the launch failed with the CUDA driver's error 719"
    assert "does not say on which GPU" in messages[4]
    zero = ["zero", 8192, 0, 256, stream]
    launch = [[3, 2, 1], [64, 1, 1], 5, stream, [4096, 0, 8192, 11, 12, 0]]
    assert seen == [zero, [7, *launch], zero, [8, *launch], zero, [66, *launch]]
    assert resolved == [["one", 0], ["one", 1], ["fails", 0]]


def test_threads_that_meet_a_key_at_once(stub_driver: Any) -> None:
    """Each calls; what one of them has resolved serves all later calls."""
    script = """
def resolve(text, ordinal):
    resolved.append(text)
    return calls.append, (0,), (), (), 1
calls = []
on_cpu, _ = _launcher.xla_handlers(resolve)
def work():
    for number in range(200):
        assert Xla().call(on_cpu, (8 + 8 * (number % 7),), (), attributes(str(number))) is None
workers = [threading.Thread(target=work) for _ in range(4)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
before = len(resolved)
work()
print(json.dumps([len(calls), before, len(resolved)]))
"""
    calls, before, after = printed(stub_driver, script)
    assert calls == 1000
    assert 200 <= before == after <= 800
