"""The loader against the stub driver: what is compiled here, tuned here or pinned."""

from __future__ import annotations

import pytest
from loading import BEST, COMPILED, CUDA, NO_BINARY_FOR_GPU, Rig, Synthetic, needs_nvrtc

from scan_registry.aot.compile import compile_variant
from scan_registry.hardware.target import Target


@needs_nvrtc
@pytest.mark.parametrize(("capability", "target"), [((12, 1), "sm_121"), ((13, 0), "compute_121")])
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
    for result in (first, second):
        assert (result["ready"]["tier"], result["ready"]["target"]) == ("jit", target)
        assert result["status"] == 0
        (warning,) = result["told"]
        assert warning.startswith("FallbackWarning: linear_scan.time_last_forward runs on tier jit")
        for word in ("Later", str(rig.stub.folder / "cache"), result["ready"]["variant"]):
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


@needs_nvrtc
def test_what_is_required_is_never_compiled(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((12, 1))
    rig.holds("ptx80", synthetic("ptx80"))
    script = f"it = attempt(prepare, lowest=policy.lowest())\n{NOTHING_COMPILED}"
    report = rig.run(script, SCAN_REGISTRY_REQUIRE="aot")
    assert report["it"]["error"] == "NoKernelError"
    assert "tier ptx; the policy allows none below same-major" in report["it"]["words"]
    assert "tier jit; the policy allows none below same-major" in report["it"]["words"]
    assert (report["nvrtc"], report["triton"], report["cache"]) == (False, False, False)
    assert rig.loads() == []


def test_nothing_is_compiled_where_something_is_installed(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((12, 1))
    rig.holds("sm120", synthetic("sm120"))
    report = rig.run(f"it = facts(prepare())\n{NOTHING_COMPILED}")
    assert report["it"]["tier"] == "same-major"
    assert (report["nvrtc"], report["triton"], report["cache"]) == (False, False, False)


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
    report = rig.run(f"""{BROKEN}
report(allowed=attempt(prepare), pinned=attempt(prepare, backend="cuda"))
""")
    assert report["allowed"]["tier"] == "reference"
    reason = report["allowed"]["rejected"][f"{COMPILED} for sm_121"]
    assert f"{COMPILED} for sm_121 did not compile\nptxas fatal: this compiler is broken" in reason
    assert report["pinned"]["error"] == "NoKernelError"
    assert "this compiler is broken" in report["pinned"]["words"]
    assert rig.loads() == []


@needs_nvrtc
def test_what_is_denied_is_not_loaded_when_it_was_compiled_here(rig: Rig) -> None:
    rig.stub.gpu((12, 1))
    binary, _ = compile_variant(COMPILED, Target.parse("sm121"))
    rig.denies({"sha256": binary.sha256, "reason": "it races"})
    report = rig.run('report(ready=facts(prepare(backend="cuda")))')
    assert (report["ready"]["tier"], report["ready"]["target"]) == ("jit", "sm_121")
    assert report["ready"]["variant"] != str(COMPILED)
    assert "denied: it races" in report["ready"]["rejected"][str(binary)]


@needs_nvrtc
def test_what_was_compiled_here_and_is_refused_is_a_reason(rig: Rig) -> None:
    rig.stub.gpu((12, 1)).fail("cuModuleLoadData", NO_BINARY_FOR_GPU, times=1)
    report = rig.run('report(ready=facts(prepare(backend="cuda")))')
    assert report["ready"]["tier"] == "jit"
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in report["ready"]["rejected"][f"{COMPILED} for sm_121"]


@needs_nvrtc
def test_a_cache_whose_place_nobody_knows_costs_a_warning(rig: Rig) -> None:
    rig.stub.gpu((12, 1))
    report = rig.run(
        """
import os, tempfile
gone = tempfile.mkdtemp()
os.chdir(gone)
os.rmdir(gone)
ready = [prepare(backend="cuda"), prepare(backend="cuda", time=2048)]
report(ready=[facts(r) for r in ready])
""",
        SCAN_REGISTRY_CACHE="relative",
    )
    assert [r["tier"] for r in report["ready"]] == ["jit", "jit"]
    kinds = sorted(warning.partition(":")[0] for warning in report["told"])
    assert kinds == ["CacheWarning", "FallbackWarning"]


def test_what_was_tuned_here_is_used(rig: Rig, synthetic: Synthetic) -> None:
    """Its row decides, and its binary runs, whether or not a wheel has it."""
    rig.stub.gpu((9, 0), name="H")
    rig.holds("sm90", *(synthetic("sm90", variant) for variant in CUDA))
    report = rig.run(
        """
from scan_registry.cache import tuned
from scan_registry.artifact.archive import Binary, digest
from scan_registry.hardware.device import device
from scan_registry.kernels.tuning import Row, Tuning
from dataclasses import replace

before = facts(prepare())
kernel = FAMILY.kernel("time_last_forward", "cuda")
chosen = [v for v in kernel.every if "=float32,access=aligned,warps=1,rows=4,lanes=32,pieces=2" in str(v)][0]
first = next(b for _, b in loader.catalogue() if b.variant.text("dtype") == "float32")
content = loader.catalogue().archives[0].read(first)
problem = prepare().decision.problem
shape = kernel.tunable.shape(problem)
tuning = Tuning.of("sm_90", "x", "d", {shape.kind: [Row(shape.sizes, {kernel.label(chosen): 0.5})]})
tuned.publish(device(0), [(replace(first, variant=chosen), content)], {kernel.head: tuning}, "d")
tuned = prepare()
report(before=before, tuned=facts(tuned), ms=tuned.decision.winner.ms, chosen=str(chosen),
       where=tuned.decision.winner.archive.provider, ran=run(tuned))
"""
    )
    assert report["before"]["variant"] == str(BEST)
    assert report["tuned"]["variant"] == report["chosen"]
    assert (report["tuned"]["tier"], report["ms"], report["ran"]) == ("exact", 0.5, 0)
    assert report["where"].endswith("/cache/tuned")


@needs_nvrtc
def test_a_pinned_variant_is_compiled_if_no_archive_has_it(rig: Rig, synthetic: Synthetic) -> None:
    rig.stub.gpu((9, 0), name="H")
    rig.holds("sm90", *(synthetic("sm90", variant) for variant in CUDA))
    report = rig.run(
        """
kernel = FAMILY.kernel("time_last_forward", "cuda")
problem = prepare().decision.problem
others = (v for v in kernel.every if "float32,access=aligned,warps=1,rows=4" in str(v) and v not in kernel.variants)
spare = next(v for v in others if kernel.rules.accepts(v, problem) is None)
def pinned(variant):
    return facts(loader.prepare(0, FAMILY, problem, "cuda", Tier.JIT, variant))
held = [v for v in kernel.variants if kernel.rules.accepts(v, problem) is None][-1]
report(spare=pinned(spare), held=pinned(held), names=[str(spare), str(held)])
"""
    )
    assert [report[name]["variant"] for name in ("spare", "held")] == report["names"]
    assert [report[name]["tier"] for name in ("spare", "held")] == ["jit", "exact"]
    assert not any("runs on tier jit" in word for word in report["told"])
