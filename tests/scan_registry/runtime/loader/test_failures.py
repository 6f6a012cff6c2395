"""The loader against the stub driver: what the driver fails at."""

from __future__ import annotations

import pytest
from loading import LAUNCH_OUT_OF_RESOURCES, NO_BINARY_FOR_GPU, OUT_OF_MEMORY, Rig, Synthetic


@pytest.mark.parametrize("call", ["cuCtxPushCurrent", "cuModuleLoadData", "cuFuncSetAttribute"])
def test_running_out_of_memory_is_raised_and_not_remembered(
    rig: Rig, synthetic: Synthetic, call: str
) -> None:
    rig.stub.gpu((9, 0)).fail(call, OUT_OF_MEMORY, times=1)
    binary, code = synthetic("sm90", dynamic_shared=65_536)
    rig.holds("sm90", (binary, code))
    rig.holds("ptx80", synthetic("ptx80"))
    report = rig.run("""
first = attempt(prepare)
second = prepare()
report(first=first, second=facts(second), status=run(second))
""")
    assert report["first"]["error"] == "DriverError"
    for word in (
        f"{call} failed with CUDA_ERROR_OUT_OF_MEMORY (out of memory)",
        "linear_scan.time_last_forward",
        str(binary),
        "grid (2, 1, 1), block (128, 1, 1), 65536 bytes of dynamic shared memory",
    ):
        assert word in report["first"]["words"]
    assert report["second"]["tier"] == "exact"
    assert (report["status"], report["told"]) == (0, [])


def test_a_launch_that_fails(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0)).fail("cuLaunchKernel", LAUNCH_OUT_OF_RESOURCES, times=1)
    binary, code = synthetic("sm90")
    rig.holds("sm90", (binary, code))
    report = rig.run("""
ready = prepare()
status = [run(ready), run(ready)]
report(status=status, it=attempt(ready.refuse, status[0]))
""")
    assert report["status"] == [LAUNCH_OUT_OF_RESOURCES, 0]
    assert report["it"]["error"] == "DriverError"
    for word in ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", str(binary), "grid (2, 1, 1)"):
        assert word in report["it"]["words"]


def test_a_launch_that_cannot_be_is_of_one_problem(rig: Rig, synthetic: Synthetic) -> None:
    """Other problems still run on the binary, and the problem itself on the next best one, also later."""
    rig.stub.gpu((9, 0))
    rig.holds("sm90", synthetic("sm90"))
    rig.holds("ptx80", synthetic("ptx80"))
    report = rig.run("""
Launch, refused = loader.Launch, []

def launch(**facts):
    if 2048 in facts["scalars"] and not refused:
        refused.append(1)
        raise OverflowError("2048 steps are too many")
    return Launch(**facts)

loader.Launch = launch
report(long=facts(prepare(time=2048)), short=facts(prepare()), again=facts(prepare(time=2048)))
""")
    assert [report[name]["tier"] for name in ("long", "short", "again")] == ["ptx", "exact", "ptx"]
    for name, refusals in (("long", 1), ("short", 0), ("again", 1)):
        reasons = [*report[name]["rejected"].values()]
        assert reasons.count("2048 steps are too many") == refusals


FOREIGN = """
library = driver.library()
prepare(1)
foreign, before = driver.primary_context(1), ctypes.c_void_p()
assert library.cuCtxSetCurrent(ctypes.c_void_p(foreign)) == 0

def unchanged():
    assert library.cuCtxGetCurrent(ctypes.byref(before)) == 0
    return before.value == foreign
"""


@pytest.mark.parametrize(
    ("failing", "status"),
    [(None, 0), ("cuModuleLoadData", NO_BINARY_FOR_GPU), ("cuModuleGetFunction", OUT_OF_MEMORY)],
)
def test_a_foreign_context_stays_current(
    rig: Rig, synthetic: Synthetic, failing: str | None, status: int
) -> None:
    rig.stub.gpu((9, 0)).gpu((8, 0)).fail("cuLaunchKernel", 700, after=1, device=0)
    if failing:
        rig.stub.fail(failing, status, times=1, device=0)
    for arch in ("sm90", "sm80", "ptx80"):
        rig.holds(arch, synthetic(arch))
    report = rig.run(f"""{FOREIGN}
states = []
attempt(prepare, 0)
states.append(unchanged())
ready = prepare(0)
states.append(unchanged())
results = [run(ready), run(ready)]
states.append(unchanged())
report(states=states, results=results)
""")
    assert report["states"] == [True, True, True]
    assert report["results"] == [0, 700]
    # Whoever is capturing a graph finds the mode as it was.
    modes = [c.number("mode") for c in rig.stub.calls("cuThreadExchangeStreamCaptureMode")]
    assert modes[0::2] == [2] * (len(modes) // 2)
    assert modes[1::2] == [0] * (len(modes) // 2)
