"""The loader against the stub driver: what runs on which GPU, and what happens when it does not.

What is tested runs in processes of its own, without torch, since a process opens one driver and
keeps it. The archives come from a provider that is installed for these processes alone, and the
package's own are left out, so that it does not matter which of them were built.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scan_registry import archive, jit, providers
from scan_registry.aot.compile import compile_variant
from scan_registry.archive import Binary
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.target import Target

Make = Callable[..., tuple[Binary, bytes]]

KERNEL = "time_last_forward"
CUDA = [v for v in FAMILY.kernel(KERNEL, "cuda").variants if v.text("dtype") == "float32"]
#: What is preferred for the scripts' problem, the next best, and what is compiled where nothing is there.
BEST = next(v for v in CUDA if "access=aligned,warps=2,rows=1" in str(v))
SECOND = COMPILED = CUDA[0]
OUT_OF_MEMORY, NO_BINARY_FOR_GPU, LAUNCH_OUT_OF_RESOURCES = 2, 209, 701

needs_nvrtc = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)

#: What every script starts with.
RIG = '''
import ctypes, json, os, sys, threading, time, warnings
from scan_registry import providers

installed = providers.installed
providers.installed = lambda: (
    tuple(p for p in installed()[0] if p.name == "acme-kernels"), ()
)

from scan_registry import driver, jit, loader, policy
from scan_registry.fit import Rung
from scan_registry.kernels import tables
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY

tables.shipped = lambda *_: ()  # what is measured on some GPU is not what is tested here
warnings.simplefilter("always")
told = []
warnings.showwarning = lambda message, *_: told.append(f"{type(message).__name__}: {message}")


def prepare(ordinal=0, backend="auto", time=1024, lowest=Rung.REFERENCE):
    strides = (*(Strides(0, 3 * time, time, 1),) * 3, Strides(0, 3, 1, 0))
    dtypes, sizes = ("float32", "float32"), (1, 2, 3, time)
    problem = LinearScanProblem("forward", "time_last", *dtypes, *sizes, strides, 16)
    return loader.prepare(ordinal, FAMILY, problem, backend, lowest)


def facts(prepared):
    winner = prepared.decision.winner
    return {
        "rung": str(winner.rung),
        "variant": str(winner.variant),
        "target": str(winner.target),
        "launches": prepared.launch is not None,
        "rejected": {r.subject: r.reason for r in prepared.decision.rejected},
    }


def attempt(action, *arguments, **keywords):
    """What came of it: the facts of what was prepared, or the error."""
    try:
        return facts(action(*arguments, **keywords))
    except Exception as error:
        return {"error": type(error).__name__, "words": str(error)}


def run(prepared):
    return prepared.launch.run(0, *range(4096, 4096 + 7))


def mapped(name):
    """Whether a library is loaded in this process."""
    with open("/proc/self/maps") as maps:
        return name in maps.read()


def report(**values):
    print(json.dumps({**values, "told": told}))
'''


@dataclass
class Rig:
    """The stub driver, and a provider called acme-kernels whose archives it gets to see."""

    stub: Any
    package: Path

    def holds(self, arch: str, *binaries: tuple[Binary, bytes]) -> Path:
        target = Target.parse(arch)
        path = self.package / "archives" / f"{target.label}{archive.SUFFIX}"
        archive.write(path, target, binaries, {"version": "1.0"})
        return path

    def denies(self, *entries: Mapping[str, str]) -> None:
        manifest = {"schema": 1, "core": ">=0", "denied": list(entries)}
        (self.package / "provider.json").write_text(json.dumps(manifest))

    def run(self, script: str, **variables: str) -> dict[str, Any]:
        """What the script reports, run with nothing cached."""
        cache = {"SCAN_REGISTRY_CACHE": str(self.stub.folder / "cache"), **variables}
        lines = script.strip().splitlines()
        text = "\n".join(["from rig import *", *lines])
        result: dict[str, Any] = json.loads(self.stub.run(text, **cache).stdout.splitlines()[-1])
        return result

    def loads(self) -> list[tuple[int | None, str, int]]:
        """Device, target and status of each module load that the driver saw."""
        calls = self.stub.calls("cuModuleLoadData")
        return [(call.device, call.image, call.status) for call in calls]


@pytest.fixture
def rig(stub_driver: Any) -> Rig:
    folder = stub_driver.folder
    package = folder / "acme_kernels"
    (package / "archives").mkdir(parents=True)
    (package / "__init__.py").touch()
    information = folder / "acme_kernels-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n"
    )
    (information / "entry_points.txt").write_text("[scan_registry.archives]\nacme = acme_kernels\n")
    (folder / "rig.py").write_text(RIG)
    made = Rig(stub_driver, package)
    made.denies()
    return made


@pytest.fixture
def synthetic(rig: Rig, a_binary: Make) -> Callable[..., tuple[Binary, bytes]]:
    """A binary of which there is as much as the stub looks at."""

    def make(target: str, variant: Variant = BEST, **changes: Any) -> tuple[Binary, bytes]:
        made_for, entry = Target.parse(target), f"{variant.family}_{variant.kernel}"
        # Each variant's bytes are its own, as they would be.
        names = (entry, f"v{FAMILY.variants().index(variant)}", *changes.pop("names", ()))
        if made_for.is_ptx:
            version = changes.pop("ptx", "8.0")
            content = rig.stub.ptx(f"sm_{made_for.number}", names, version)
        else:
            content = rig.stub.cubin(str(made_for), names, 8 if made_for.number >= 100 else 7)
        return a_binary(variant, made_for, content, **changes)

    return make


Synthetic = Callable[..., tuple[Binary, bytes]]


# --- What runs where --------------------------------------------------------------------------


def test_two_gpus_get_different_binaries(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0), name="H").gpu((8, 0), name="A", sms=108)
    rig.holds("sm90", synthetic("sm90"))
    rig.holds("sm80", synthetic("sm80"))
    found = rig.run("""
ready = [prepare(0), prepare(1), prepare(0)]
report(ready=[facts(r) for r in ready], status=[run(r) for r in ready])
""")
    assert [(r["rung"], r["target"]) for r in found["ready"]] == [
        ("exact", "sm_90"),
        ("exact", "sm_80"),
        ("exact", "sm_90"),
    ]
    assert rig.loads() == [(0, "sm_90", 0), (1, "sm_80", 0)]
    launches = rig.stub.calls("cuLaunchKernel")
    assert [launch.device for launch in launches] == [0, 1, 0]
    assert found["status"] == [0, 0, 0]
    assert {launch.block for launch in launches} == {(128, 1, 1)}
    assert found["told"] == []


@needs_nvrtc
def test_binaries_of_the_real_compiler(rig: Rig) -> None:
    rig.stub.gpu((9, 0)).gpu((8, 6)).gpu((10, 0))
    for arch in ("sm90", "sm80", "ptx80"):
        rig.holds(arch, compile_variant(BEST, Target.parse(arch)))
    found = rig.run("""
ready = [prepare(0), prepare(1), prepare(2)]
report(ready=[facts(r) for r in ready], status=[run(r) for r in ready])
""")
    rungs = [r["rung"] for r in found["ready"]]
    assert rungs == ["exact", "same-major", "ptx"]
    assert rig.loads() == [(0, "sm_90", 0), (1, "sm_80", 0), (2, "compute_80", 0)]
    assert (found["status"], found["told"]) == ([0, 0, 0], [])


def test_the_cpu_needs_no_driver(rig: Rig, synthetic: Synthetic) -> None:
    rig.holds("sm90", synthetic("sm90"))
    found = rig.run("report(ready=facts(prepare(None)), opened=mapped('libcuda'))")
    assert found["ready"]["rung"] == "reference"
    assert not found["ready"]["launches"]
    assert not found["opened"]
    assert rig.stub.calls() == []


def test_a_driver_that_cannot_be_opened_is_named(rig: Rig) -> None:
    found = rig.run("report(it=attempt(prepare))", SCAN_REGISTRY_LIBCUDA="/nowhere/libcuda.so.1")
    assert found["it"]["error"] == "RuntimeError"
    assert "/nowhere/libcuda.so.1" in found["it"]["words"]


def test_a_machine_without_a_gpu(rig: Rig) -> None:
    found = rig.run("report(it=attempt(prepare))")
    assert found["it"]["error"] == "DriverError"
    assert "CUDA_ERROR_NO_DEVICE" in found["it"]["words"]


def test_much_dynamic_shared_memory_is_asked_for(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0))
    rig.holds("sm90", synthetic("sm90", dynamic_shared=100_000, static_shared=0))
    found = rig.run("report(status=run(prepare()))")
    assert found["status"] == 0
    (call,) = rig.stub.calls("cuFuncSetAttribute")
    assert call.number("value") == 100_000


# --- What does not run ------------------------------------------------------------------------


def test_a_damaged_binary_warns_and_the_next_rung_is_taken(
    rig: Rig, synthetic: Synthetic, archive_parts: Any
) -> None:
    rig.stub.gpu((9, 0))
    held = synthetic("sm90")
    path, binary = rig.holds("sm90", held), held[0]
    rig.holds("ptx80", synthetic("ptx80"))
    path.write_bytes(archive_parts.flipped(path.read_bytes()))
    found = rig.run("""
ready = [prepare(), prepare(time=2048)]
report(ready=[facts(r) for r in ready])
""")
    for ready in found["ready"]:
        assert ready["rung"] == "ptx"
        assert str(path) in ready["rejected"][str(binary)]
    assert rig.loads() == [(0, "compute_80", 0)]
    (warning,) = found["told"]
    assert warning.startswith("FallbackWarning")
    for word in (str(path), str(binary), binary.sha256):
        assert word in warning


def test_a_damaged_manifest_warns_and_the_next_rung_is_taken(
    rig: Rig, synthetic: Synthetic
) -> None:
    rig.stub.gpu((9, 0))
    path = rig.holds("sm90", synthetic("sm90"))
    rig.holds("ptx80", synthetic("ptx80"))
    path.write_bytes(path.read_bytes().replace(b"imaginary", b"imbginary", 1))
    found = rig.run("""
ready = [prepare(), prepare(time=2048)]
report(ready=[facts(r) for r in ready])
""")
    for ready in found["ready"]:
        assert ready["rung"] == "ptx"
        assert str(path) in ready["rejected"]["acme-kernels's sm90.scanreg"]
    (warning,) = found["told"]
    assert warning.startswith("FallbackWarning")
    assert str(path) in warning


def test_a_file_that_is_named_after_no_architecture_warns_once(
    rig: Rig, synthetic: Synthetic
) -> None:
    rig.stub.gpu((9, 0))
    path = rig.holds("sm90", synthetic("sm90"))
    backup = path.with_name(f"sm90 (copy){archive.SUFFIX}")
    backup.write_bytes(path.read_bytes())
    found = rig.run("""
ready = [prepare(), prepare(time=2048)]
report(ready=[facts(r) for r in ready])
""")
    assert [ready["rung"] for ready in found["ready"]] == ["exact", "exact"]
    (warning,) = found["told"]
    assert warning == f"FallbackWarning: {backup} {providers.MISNAMED}"


def test_one_damaged_binary_does_not_spoil_its_archive(
    rig: Rig, synthetic: Synthetic, archive_parts: Any
) -> None:
    rig.stub.gpu((9, 0))
    first, second = synthetic("sm90"), synthetic("sm90", SECOND)
    path, best = rig.holds("sm90", first, second), first[0]
    path.write_bytes(archive_parts.flipped(path.read_bytes(), 0))
    found = rig.run("report(ready=facts(prepare()))")
    assert (found["ready"]["rung"], found["ready"]["variant"]) == ("exact", str(SECOND))
    assert "SHA-256" in found["ready"]["rejected"][str(best)]


def test_an_archive_that_vanishes(rig: Rig, synthetic: Synthetic) -> None:
    """Its manifest has been read, then the package is upgraded under the process."""
    rig.stub.gpu((9, 0))
    path = rig.holds("sm90", synthetic("sm90"))
    rig.holds("ptx80", synthetic("ptx80"))
    found = rig.run(f"""
decision = loader.decide(0, FAMILY, prepare(None).decision.problem, "auto", Rung.REFERENCE)
os.unlink({str(path)!r})
report(before=str(decision.winner.rung), ready=facts(prepare()))
""")
    assert (found["before"], found["ready"]["rung"]) == ("exact", "ptx")
    assert "No such file" in found["told"][0]
    assert str(path) in found["told"][0]


@pytest.mark.parametrize(
    ("call", "status", "name"),
    [
        ("cuModuleLoadData", 200, "CUDA_ERROR_INVALID_IMAGE"),
        ("cuModuleLoadData", NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ("cuModuleLoadData", 218, "CUDA_ERROR_INVALID_PTX"),
        ("cuModuleLoadData", 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        ("cuModuleLoadData", 223, "CUDA_ERROR_JIT_COMPILATION_DISABLED"),
        ("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND"),
    ],
)
def test_what_the_driver_refuses_is_a_reason(
    rig: Rig, synthetic: Synthetic, call: str, status: int, name: str
) -> None:
    """It holds for that binary on that device alone, and is not tried again."""
    rig.stub.gpu((9, 0)).gpu((9, 0)).fail(call, status, times=1, device=0)
    binary, code = synthetic("sm90")
    rig.holds("sm90", (binary, code))
    rig.holds("ptx80", synthetic("ptx80"))
    found = rig.run("""
ready = [prepare(0), prepare(0, time=2048), prepare(1)]
report(ready=[facts(r) for r in ready])
""")
    assert [r["rung"] for r in found["ready"]] == ["ptx", "ptx", "exact"]
    for ready in found["ready"][:2]:
        assert name in ready["rejected"][str(binary)]
    assert [(device, image) for device, image, _ in rig.loads()] == [
        (0, "sm_90"),
        (0, "compute_80"),
        (1, "sm_90"),
    ]


def test_ptx_of_a_later_release_than_it_states(rig: Rig, synthetic: Synthetic) -> None:
    """The manifest is wrong about the driver that it needs; the driver is right."""
    rig.stub.version = (12, 4)
    rig.stub.gpu((9, 0))
    late, _ = given = synthetic("ptx90", ptx="8.8", oldest_driver=(12, 0))
    rig.holds("ptx90", given)
    rig.holds("ptx80", synthetic("ptx80", ptx="8.4", oldest_driver=(12, 4)))
    found = rig.run("report(ready=facts(prepare()))")
    assert found["ready"]["target"] == "compute_80"
    assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in found["ready"]["rejected"][str(late)]


def test_nothing_runs(rig: Rig, synthetic: Synthetic) -> None:
    """What was found out by trying stands in the error."""
    rig.stub.gpu((9, 0)).fail("cuModuleLoadData", NO_BINARY_FOR_GPU)
    binary, code = synthetic("sm90")
    rig.holds("sm90", (binary, code))
    found = rig.run("report(it=attempt(prepare, lowest=Rung.PTX))")
    assert found["it"]["error"] == "NoKernelError"
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in found["it"]["words"]
    assert str(binary) in found["it"]["words"]


# --- What the driver fails at -----------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "cuCtxPushCurrent",
        "cuThreadExchangeStreamCaptureMode",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncSetAttribute",
    ],
)
def test_running_out_of_memory_is_raised_and_not_remembered(
    rig: Rig, synthetic: Synthetic, call: str
) -> None:
    rig.stub.gpu((9, 0)).fail(call, OUT_OF_MEMORY, times=1)
    binary, code = synthetic("sm90", dynamic_shared=65_536)
    rig.holds("sm90", (binary, code))
    rig.holds("ptx80", synthetic("ptx80"))
    found = rig.run("""
first = attempt(prepare)
second = prepare()
report(first=first, second=facts(second), status=run(second))
""")
    assert found["first"]["error"] == "DriverError"
    for word in (
        f"{call} failed with CUDA_ERROR_OUT_OF_MEMORY (out of memory)",
        "linear_scan.time_last_forward",
        str(binary),
        "grid (6, 1, 1), block (128, 1, 1), 65536 bytes of dynamic shared memory",
    ):
        assert word in found["first"]["words"]
    assert found["second"]["rung"] == "exact"
    assert (found["status"], found["told"]) == (0, [])


def test_a_launch_that_fails(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0)).fail("cuLaunchKernel", LAUNCH_OUT_OF_RESOURCES, times=1)
    binary, code = synthetic("sm90")
    rig.holds("sm90", (binary, code))
    found = rig.run("""
ready = prepare()
status = [run(ready), run(ready)]
report(status=status, it=attempt(ready.refuse, status[0]))
""")
    assert found["status"] == [LAUNCH_OUT_OF_RESOURCES, 0]
    assert found["it"]["error"] == "DriverError"
    for word in ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", str(binary), "grid (6, 1, 1)"):
        assert word in found["it"]["words"]


FOREIGN = """
library = driver.library()
prepare(1)
foreign, before = driver.primary_context(1), ctypes.c_void_p()
assert library.cuCtxSetCurrent(ctypes.c_void_p(foreign)) == 0

def unchanged():
    assert library.cuCtxGetCurrent(ctypes.byref(before)) == 0
    return before.value == foreign
"""


@pytest.mark.parametrize("failing", [None, "cuModuleLoadData", "cuModuleGetFunction"])
@pytest.mark.parametrize("status", [OUT_OF_MEMORY, NO_BINARY_FOR_GPU])
def test_a_foreign_context_stays_current(
    rig: Rig, synthetic: Synthetic, failing: str | None, status: int
) -> None:
    rig.stub.gpu((9, 0)).gpu((8, 0)).fail("cuLaunchKernel", 700, after=1, device=0)
    if failing:
        rig.stub.fail(failing, status, times=1, device=0)
    for arch in ("sm90", "sm80", "ptx80"):
        rig.holds(arch, synthetic(arch))
    found = rig.run(f"""{FOREIGN}
states = []
attempt(prepare, 0)
states.append(unchanged())
ready = prepare(0)
states.append(unchanged())
results = [run(ready), run(ready)]
states.append(unchanged())
report(states=states, results=results)
""")
    assert found["states"] == [True, True, True]
    assert found["results"] == [0, 700]
    # Whoever is capturing a graph finds the mode as it was.
    modes = [c.number("mode") for c in rig.stub.calls("cuThreadExchangeStreamCaptureMode")]
    assert modes[0::2] == [2] * (len(modes) // 2)
    assert modes[1::2] == [0] * (len(modes) // 2)


# --- Compiled here ----------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize(
    ("capability", "target"), [((12, 1), "sm_121"), ((13, 0), "compute_121"), ((8, 7), "sm_87")]
)
def test_an_architecture_that_nothing_was_built_for(
    rig: Rig, synthetic: Synthetic, capability: tuple[int, int], target: str
) -> None:
    rig.stub.gpu(capability, name="Later", shared=101_376)
    rig.holds("sm90", synthetic("sm90"))
    script = """
ready = prepare(backend="cuda")
report(ready=facts(ready), status=run(ready), compiler=mapped("libnvrtc"))
"""
    first, second = rig.run(script), rig.run(script)
    for found in (first, second):
        assert (found["ready"]["rung"], found["ready"]["target"]) == ("jit", target)
        assert found["status"] == 0
        (warning,) = found["told"]
        assert warning.startswith("FallbackWarning: linear_scan.time_last_forward runs on rung jit")
        for word in ("Later", str(rig.stub.folder / "cache"), found["ready"]["variant"]):
            assert word in warning
    assert "compiled by nvrtc" in first["told"][0]
    assert "install a scan-registry wheel" in first["told"][0]
    assert "or ship what `scan-registry cache export` makes" in first["told"][0]
    assert "taken from the cache" in second["told"][0]
    assert (first["compiler"], second["compiler"]) == (True, False)
    assert rig.loads() == [(0, target, 0)] * 2


NOTHING_COMPILED = """
report(
    it=it,
    nvrtc=mapped("libnvrtc"),
    triton="triton" in sys.modules,
    cache=os.path.exists(os.environ["SCAN_REGISTRY_CACHE"]),
)
"""


@pytest.mark.parametrize("source", ["require", "SCAN_REGISTRY_REQUIRE"])
def test_what_is_required_is_never_compiled(rig: Rig, synthetic: Synthetic, source: str) -> None:
    rig.stub.gpu((12, 1))
    rig.holds("ptx80", synthetic("ptx80"))
    if source == "require":
        found = rig.run(f"""
with policy.require("aot"):
    it = attempt(prepare, lowest=policy.lowest())
{NOTHING_COMPILED}""")
    else:
        script = f"it = attempt(prepare, lowest=policy.lowest())\n{NOTHING_COMPILED}"
        found = rig.run(script, SCAN_REGISTRY_REQUIRE="aot")
    assert found["it"]["error"] == "NoKernelError"
    assert "rung ptx; the policy allows none below same-major" in found["it"]["words"]
    assert "rung jit; the policy allows none below same-major" in found["it"]["words"]
    assert (found["nvrtc"], found["triton"], found["cache"]) == (False, False, False)
    assert rig.loads() == []


def test_ptx_may_be_required_instead(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((12, 1))
    rig.holds("ptx80", synthetic("ptx80"))
    script = f"it = attempt(prepare, lowest=policy.lowest())\n{NOTHING_COMPILED}"
    found = rig.run(script, SCAN_REGISTRY_REQUIRE="ptx")
    assert found["it"]["rung"] == "ptx"
    assert (found["nvrtc"], found["triton"], found["cache"]) == (False, False, False)


def test_nothing_is_compiled_where_something_is_installed(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((12, 1))
    rig.holds("sm120", synthetic("sm120"))
    found = rig.run(f"it = facts(prepare())\n{NOTHING_COMPILED}")
    assert found["it"]["rung"] == "same-major"
    assert (found["nvrtc"], found["triton"], found["cache"]) == (False, False, False)


#: Compilers that fail, and say so.
BROKEN = """
from scan_registry.aot import compile as compiling

class Broken:
    def __init__(self, real):
        self.real = real
    def __getattr__(self, name):
        return getattr(self.real, name)
    def compile(self, kernel, variant, target, shared):
        raise jit.CompileError("ptxas fatal: this compiler is broken")

real = dict(compiling.COMPILERS)
compiling.COMPILERS = {"cuda": Broken(real["cuda"])}
"""


@needs_nvrtc
def test_what_does_not_compile_is_a_reason(rig: Rig) -> None:
    rig.stub.gpu((12, 1))
    found = rig.run(f"""{BROKEN}
report(allowed=attempt(prepare), pinned=attempt(prepare, backend="cuda"))
""")
    assert found["allowed"]["rung"] == "reference"
    reason = found["allowed"]["rejected"][f"{COMPILED} for sm_121"]
    assert f"{COMPILED} for sm_121 did not compile\nptxas fatal: this compiler is broken" in reason
    assert found["pinned"]["error"] == "NoKernelError"
    assert "this compiler is broken" in found["pinned"]["words"]
    assert rig.loads() == []


@needs_nvrtc
def test_what_is_denied_is_not_loaded_when_it_was_compiled_here(rig: Rig) -> None:
    rig.stub.gpu((12, 1))
    binary, _ = compile_variant(COMPILED, Target.parse("sm121"))
    rig.denies({"sha256": binary.sha256, "reason": "it races"})
    found = rig.run('report(ready=facts(prepare(backend="cuda")))')
    assert (found["ready"]["rung"], found["ready"]["target"]) == ("jit", "sm_121")
    assert found["ready"]["variant"] != str(COMPILED)
    assert "denied: it races" in found["ready"]["rejected"][str(binary)]


@needs_nvrtc
def test_what_was_compiled_here_and_is_refused_is_a_reason(rig: Rig) -> None:
    rig.stub.gpu((12, 1)).fail("cuModuleLoadData", NO_BINARY_FOR_GPU, times=1)
    found = rig.run('report(ready=facts(prepare(backend="cuda")))')
    assert found["ready"]["rung"] == "jit"
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in found["ready"]["rejected"][f"{COMPILED} for sm_121"]


@needs_nvrtc
def test_a_cache_that_cannot_be_used_costs_a_warning(rig: Rig) -> None:
    rig.stub.gpu((12, 1))
    (rig.stub.folder / "cache").write_text("not a folder")
    found = rig.run("""
ready = [prepare(backend="cuda"), prepare(backend="cuda", time=2048)]
report(ready=[facts(r) for r in ready])
""")
    assert [r["rung"] for r in found["ready"]] == ["jit", "jit"]
    kinds = sorted(warning.partition(":")[0] for warning in found["told"])
    assert kinds == ["CacheWarning", "FallbackWarning"]


# --- Processes and threads --------------------------------------------------------------------


def test_threads_load_each_binary_once_per_device(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0)).gpu((8, 0))
    for arch in ("sm90", "sm80"):
        rig.holds(arch, synthetic(arch))
    found = rig.run("""
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
    assert found["targets"] == ["sm_90", "sm_80"] * 8
    assert found["status"] == [0] * 16
    assert sorted(rig.loads()) == [(0, "sm_90", 0), (1, "sm_80", 0)]


@needs_nvrtc
def test_threads_compile_once(rig: Rig) -> None:
    rig.stub.gpu((12, 1))
    found = rig.run("""
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
    assert found["compiles"] == [str(COMPILED)]
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


def test_a_forked_child_prepares_if_its_parent_has_not_used_the_gpu(
    rig: Rig, synthetic: Synthetic
) -> None:
    """Everything is imported, the catalogue is read, and a thread is in the middle of preparing."""
    rig.stub.gpu((9, 0))
    rig.holds("sm90", synthetic("sm90"))
    found = rig.run(f"""{FORKED}
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
    assert (found["child"][0]["rung"], found["child"][1]) == ("exact", 0)
    assert found["parent"]["rung"] == "exact"


def test_a_forked_child_is_told_that_cuda_does_not_survive_forks(
    rig: Rig, synthetic: Synthetic
) -> None:
    """CUDA cannot be used after a fork; the child gets the driver's error and no stale handle."""
    rig.stub.gpu((9, 0))
    rig.holds("sm90", synthetic("sm90"))
    found = rig.run(f"""{FORKED}
before = prepare()
child = forked(lambda: [attempt(prepare), facts(prepare(None))])
report(child=child, parent=attempt(prepare), status=run(before))
""")
    first, second = found["child"]
    assert first["error"] == "DriverError"
    assert "CUDA_ERROR_NOT_INITIALIZED" in first["words"]
    assert second["rung"] == "reference"
    assert (found["parent"]["rung"], found["status"]) == ("exact", 0)
    processes = {call.process for call in rig.stub.calls("cuLaunchKernel")}
    assert len(processes) == 1


# --- Tuned and pinned -------------------------------------------------------------------------


def test_what_was_tuned_here_is_used(rig: Rig, synthetic: Synthetic) -> None:
    """Its row decides, and its binary runs, whether or not a wheel has it."""
    rig.stub.gpu((9, 0), name="H")
    rig.holds("sm90", *(synthetic("sm90", variant) for variant in CUDA))
    found = rig.run(
        """
from scan_registry import local
from scan_registry.archive import Binary, digest
from scan_registry.device import device
from scan_registry.kernels.tuning import Row, Tuning
from dataclasses import replace

before = facts(prepare())
kernel = FAMILY.kernel("time_last_forward", "cuda")
chosen = [v for v in kernel.every if "=float32,access=aligned,warps=1,rows=4,lanes=32,pieces=2" in str(v)][0]
first = next(b for _, b in loader.catalogue() if b.variant.text("dtype") == "float32")
content = loader.catalogue().archives[0].read(first)
problem = prepare().decision.problem
shape = kernel.shape(problem)
tuning = Tuning.of("sm_90", "x", "d", {shape.kind: [Row(shape.sizes, {kernel.label(chosen): 0.5})]})
local.publish(device(0), [(replace(first, variant=chosen), content)], {kernel.head: tuning}, "d")
tuned = prepare()
report(before=before, tuned=facts(tuned), ms=tuned.decision.winner.ms, chosen=str(chosen),
       where=tuned.decision.winner.archive.provider, ran=run(tuned))
"""
    )
    assert found["before"]["variant"] == str(BEST)
    assert found["tuned"]["variant"] == found["chosen"]
    assert (found["tuned"]["rung"], found["ms"], found["ran"]) == ("exact", 0.5, 0)
    assert found["where"].endswith("/cache/tuned")


def test_what_was_tuned_here_and_is_damaged_is_passed_over(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0), name="H")
    rig.holds("sm90", *(synthetic("sm90", variant) for variant in CUDA))
    found = rig.run(
        """
from pathlib import Path
from scan_registry import local
from scan_registry.device import device
there = local.tuned_cache()
path = there.folder / "ab"
local.publish(device(0), [], {}, "d")
(file,) = there.folder.rglob("*.scanreg")
file.write_bytes(b"not an archive")
report(found=facts(prepare()))
"""
    )
    assert (found["found"]["variant"], found["found"]["rung"]) == (str(BEST), "exact")


@needs_nvrtc
def test_a_pinned_variant_is_compiled_if_no_archive_has_it(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0), name="H")
    rig.holds("sm90", *(synthetic("sm90", variant) for variant in CUDA))
    found = rig.run(
        """
kernel = FAMILY.kernel("time_last_forward", "cuda")
problem = prepare().decision.problem
others = (v for v in kernel.every if "float32,access=aligned,warps=1,rows=4" in str(v) and v not in kernel.variants)
spare = next(v for v in others if kernel.accepts(v, problem) is None)
def pinned(variant):
    return facts(loader.prepare(0, FAMILY, problem, "cuda", Rung.JIT, variant))
held = [v for v in kernel.variants if kernel.accepts(v, problem) is None][-1]
report(spare=pinned(spare), held=pinned(held), names=[str(spare), str(held)])
"""
    )
    assert [found[name]["variant"] for name in ("spare", "held")] == found["names"]
    assert [found[name]["rung"] for name in ("spare", "held")] == ["jit", "exact"]
    assert not any("runs on rung jit" in word for word in found["told"])
