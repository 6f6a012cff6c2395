"""The loader against the stub driver, in several processes and threads."""

from __future__ import annotations

import pytest
from loading import COMPILED, Rig, Synthetic, needs_nvrtc


def test_threads_load_each_binary_once_per_device(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0)).gpu((8, 0))
    for arch in ("sm90", "sm80"):
        rig.holds(arch, synthetic(arch))
    report = rig.run("""
sys.setswitchinterval(1e-5)
barrier, results = threading.Barrier(16), [None] * 16

def work(number):
    barrier.wait()
    results[number] = [facts(prepare(number % 2)), run(prepare((number + 1) % 2))]

threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
report(targets=[r[0]["target"] for r in results], status=[r[1] for r in results])
""")
    assert report["targets"] == ["sm_90", "sm_80"] * 8
    assert report["status"] == [0] * 16
    assert sorted(rig.loads()) == [(0, "sm_90", 0), (1, "sm_80", 0)]


@needs_nvrtc
def test_threads_compile_once(rig: Rig) -> None:
    rig.stub.gpu((12, 1))
    report = rig.run("""
from scan_registry.aot import compile as compiling
compiles, real = [], compiling._compile
compiling._compile = lambda made_of, *rest: compiles.append(str(made_of.variant)) or real(made_of)
barrier = threading.Barrier(16)

def work():
    barrier.wait()
    prepare(backend="cuda")

threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
report(compiles=compiles)
""")
    assert report["compiles"] == [str(COMPILED)]
    assert rig.loads() == [(0, "sm_121", 0)]


#: Runs an action in a forked child, which must end in time, and gives what it returned.
FORKED = """
def forked(action):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(write)
    for _ in range(200):
        if os.waitpid(child, os.WNOHANG)[0]:
            return json.loads(os.read(read, 1 << 16))
        time.sleep(0.05)
    os.kill(child, 9)
    return {"error": "the child hangs"}
"""


@pytest.fixture
def hopper(rig: Rig, synthetic: Synthetic) -> Rig:
    """With a GPU, and an archive for it."""
    rig.stub.gpu((9, 0))
    rig.holds("sm90", synthetic("sm90"))
    return rig


def test_a_forked_child_prepares_if_its_parent_has_not_used_the_gpu(hopper: Rig) -> None:
    """Everything is imported, the catalogue is read, and a thread is in the middle of preparing."""
    report = hopper.run(f"""{FORKED}
prepare(None)
loader.catalogue()
held, done = threading.Event(), threading.Event()

def hold():
    with loader._lock:
        held.set()
        done.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = forked(lambda: [facts(ready := prepare()), run(ready)])
done.set()
thread.join()
report(child=child, parent=attempt(prepare))
""")
    assert (report["child"][0]["tier"], report["child"][1]) == ("exact", 0)
    assert report["parent"]["tier"] == "exact"


def test_a_forked_child_is_told_that_cuda_does_not_survive_forks(hopper: Rig) -> None:
    """CUDA cannot be used after a fork; the child gets the driver's error and no stale handle."""
    report = hopper.run(f"""{FORKED}
before = prepare()
child = forked(lambda: [attempt(prepare), facts(prepare(None))])
report(child=child, parent=attempt(prepare), status=run(before))
""")
    first, second = report["child"]
    assert first["error"] == "DriverError"
    assert "CUDA_ERROR_NOT_INITIALIZED" in first["words"]
    assert second["tier"] == "reference"
    assert (report["parent"]["tier"], report["status"]) == ("exact", 0)
    processes = {call.process for call in hopper.stub.calls("cuLaunchKernel")}
    assert len(processes) == 1
