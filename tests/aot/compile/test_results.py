"""Compiling a toy family: what comes out, and what fails."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
from changing import changed
from compiling import CUDA, LINEAR_SCAN, SM90, SPILL, TRITON, Toy, compiling

from scan_registry.aot import build, elf, nvrtc, ptxas
from scan_registry.aot.compile import compile_variant, refuse_parameters, refuse_spill
from scan_registry.aot.plan import Job
from scan_registry.aot.toolchain import CompileError, MissingCompilerError
from scan_registry.artifact.archive import digest
from scan_registry.cache.store import Cache
from scan_registry.hardware.target import RELEASED, Target
from scan_registry.kernels import families
from scan_registry.kernels.model import Kernel, Parameter

# --- What comes out ---------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm80", "sm90a", "ptx80"])
def test_a_binary_states_what_was_compiled(toy: Toy, arch: str) -> None:
    target = Target.parse(arch)
    binary, content = compile_variant(toy.variant, target)
    assert (binary.variant, binary.target, binary.entry) == (toy.variant, target, "toy")
    assert (binary.block, binary.dynamic_shared, binary.hidden) == ((128, 1, 1), 0, 0)
    assert (binary.size, binary.sha256) == (len(content), digest(content))
    assert binary.compiler.startswith("nvrtc ")
    assert binary.oldest_driver == ((12, 9) if target.is_ptx else (12, 0))
    assert binary.format_version == ("8.8" if target.is_ptx else "7")
    assert f"--gpu-architecture={target}" in binary.options
    assert "--define-macro=SCALE=2" in binary.options
    if target.is_ptx:
        assert (binary.format, binary.registers, binary.spill_bytes) == ("ptx", None, None)
        assert b".target sm_80" in content
        assert b".entry toy(" in content
        assert not content.endswith(b"\0")
    else:
        assert (binary.format, binary.spill_bytes) == ("cubin", 0)
        assert elf.arch_number(content) == target.number


@pytest.mark.parametrize(
    ("arch", "made_for"), [("sm80", "sm_80"), ("sm90", "sm_90a"), ("ptx80", "compute_80")]
)
def test_triton(arch: str, made_for: str) -> None:
    binary, content = compile_variant(TRITON, Target.parse(arch))
    assert (str(binary.target), binary.hidden) == (made_for, 2)
    kernel = LINEAR_SCAN.kernel("time_last_forward", "triton")
    assert binary.block == (32 * kernel.code.warps(TRITON), 1, 1)
    assert binary.entry.encode() in content
    assert binary.compiler.startswith("triton ")
    # Without line information nothing of the source's place gets into the code.
    assert b"triton_kernels" not in content


def test_triton_does_not_see_a_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does compiling change the environment, which the user's own Triton kernels have, too."""
    binary, _ = compile_variant(TRITON, SM90)
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nowhere/ptxas")
    monkeypatch.setenv("PTXAS_OPTIONS", "-O0")
    before = dict(os.environ)
    assert compile_variant(TRITON, SM90)[0] == binary
    assert dict(os.environ) == before


RELEASES = [Target.parse(arch) for arch in RELEASED]
#: Those for which NVRTC makes the same PTX.
LIKE_80 = [Target.parse(arch) for arch in ("sm80", "sm86", "sm89", "sm90", "ptx80")]
#: Kernels whose source asks whether it is compiled for 9.0.
OF_ITS_OWN_ON_90 = ("causal_conv1d.time_last_backward:cuda", "ssd_scan.forward:cuda")


IN_CUDA = [k for item in families().values() for k in item.kernels if k.language == "cuda"]


#: The first kernel of each family, and those that are made of their own on 9.0.
FIRST = {k.family: k for k in reversed(IN_CUDA)}.values()
SHARED = [k for k in IN_CUDA if k.head in OF_ITS_OWN_ON_90 or k in FIRST]
#: By turns compared on each architecture, as often as there are such.
ON_EACH = [
    pytest.param(
        k,
        marks=[] if k.head in OF_ITS_OWN_ON_90[:1] or n < len(LIKE_80) else [pytest.mark.thorough],
    )
    for n, k in enumerate(SHARED)
]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ON_EACH, ids=lambda kernel: kernel.head)
def test_what_architectures_share_changes_no_byte(kernel: Kernel, programs: list[str]) -> None:
    """Of one variant. Kernels that are made of their own on 9.0 are compared on 9.0 and 8.6, the others on one architecture
    each, by turns; and all have 8.0, whose PTX is shared."""
    variant = next(
        v for v in kernel.variants if all(kernel.rules.serves(v.statics, item) for item in LIKE_80)
    )
    turn = LIKE_80[SHARED.index(kernel) % len(LIKE_80)].label
    compared = {"sm90", "sm86"} if kernel.head in OF_ITS_OWN_ON_90 else {turn}
    alone = {label: compile_variant(variant, Target.parse(label)) for label in compared}
    programs.clear()
    shared: dict[str, Any] = {}
    together = {
        arch.label: compile_variant(variant, arch, None, shared)
        for arch in LIKE_80
        if arch.label in {*compared, "sm80", "ptx80"}
    }
    assert {label: together[label] for label in alone} == alone
    # The PTX of 8.0 is a by-product of its machine code.
    assert programs == (["sm_80", "sm_90"] if kernel.head in OF_ITS_OWN_ON_90 else ["sm_80"])


#: Another job of the checks compiles every variant for every architecture, and fails where one spills.
OF_EACH_FAMILY = [
    pytest.param(k, marks=[] if k in FIRST else [pytest.mark.thorough]) for k in IN_CUDA
]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", OF_EACH_FAMILY, ids=lambda kernel: kernel.head)
def test_a_variant_of_each_kernel_compiles_without_spills(kernel: Kernel) -> None:
    """For architectures that ``tools/dev.py test`` builds no archive for, by turns."""
    arch = Target.parse(("sm80", "sm100", "sm120")[IN_CUDA.index(kernel) % 3])
    variant = next(v for v in kernel.variants if kernel.rules.serves(v.statics, arch))
    binary, _ = compile_variant(variant, arch)
    refuse_spill(binary)
    assert binary.target == arch


@pytest.mark.slow
def test_what_architectures_share_of_triton_changes_no_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = [compile_variant(TRITON, target) for target in RELEASES]
    lowered: list[str] = []
    generator = importlib.import_module("triton.compiler.code_generator")
    backend = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    for where, step in ((generator, "ast_to_ttir"), (backend, "make_llir")):
        original = getattr(where, step)

        def counted(*inputs: Any, _of: Any = (step, original), **named: Any) -> Any:
            lowered.append(_of[0])
            return _of[1](*inputs, **named)

        monkeypatch.setattr(where, step, counted)
    shared: dict[str, Any] = {}
    assert [compile_variant(TRITON, target, None, shared) for target in RELEASES] == alone
    # 8.6 and 8.9 have the PTX of 8.0, and 12.0 that of 10.0.
    assert (lowered.count("ast_to_ttir"), lowered.count("make_llir")) == (1, 3)


@pytest.mark.parametrize(
    "reason", ["it asks", "no number", "no assembler", "a suffix", "another order", "later ones"]
)
def test_what_is_compiled_for_each_architecture(
    reason: str, toy: Toy, programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the PTX of 8.0 would not do, or is not there, or nothing assembles it: as alone."""
    targets = [Target.parse(arch) for arch in ("sm80", "sm89", "sm90")]
    if reason == "it asks":
        toy.write(
            "scale.cuh",
            "__device__ inline float scaled(float x) { return __CUDA_ARCH__ >= 890; }\n",
        )
        targets = [Target.parse(arch) for arch in ("sm80", "sm89")]
    elif reason == "no number":
        toy.write(
            "scale.cuh", "__device__ inline float scaled(float x) { return __CUDA_ARCH__; }\n"
        )
    elif reason == "no assembler":
        monkeypatch.setattr(ptxas, "find", lambda version: None)
    elif reason == "a suffix":
        targets = [Target.parse(arch) for arch in ("sm80", "sm90a")]
    elif reason == "another order":
        targets.reverse()
    else:
        targets = [Target.parse(arch) for arch in ("sm80", "sm100", "sm120")]
    alone = [compile_variant(toy.variant, target) for target in targets]
    programs.clear()
    shared: dict[str, Any] = {}
    assert [compile_variant(toy.variant, target, None, shared) for target in targets] == alone
    assert programs == [str(target) for target in targets]


def test_an_answer_that_is_the_same_is_none(toy: Toy, programs: list[str]) -> None:
    """Of 8.9 and 9.0 the first has the PTX of 8.0, where a source asks for the second."""
    toy.write(
        "scale.cuh",
        "__device__ inline float scaled(float x) { return __CUDA_ARCH__ == 900 ? x : 2 * x; }\n",
    )
    targets = [Target.parse(arch) for arch in ("sm80", "sm89", "sm90")]
    alone = [compile_variant(toy.variant, target) for target in targets]
    programs.clear()
    shared: dict[str, Any] = {}
    assert [compile_variant(toy.variant, target, None, shared) for target in targets] == alone
    assert programs == ["sm_80", "sm_90"]


@pytest.mark.parametrize(
    ("labels", "compiled"),
    [("ptx80 sm90 sm86 sm80", "sm_80"), ("sm90 ptx80", "compute_80"), ("sm90", "sm_90")],
)
def test_a_build_begins_with_what_others_share(
    labels: str, compiled: str, programs: list[str]
) -> None:
    """In whichever order architectures are named."""
    archs = [Target.parse(arch) for arch in labels.split()]
    created = build._compile([Job(CUDA, arch) for arch in archs], None)
    assert {job.arch for job in created} == {*archs}
    assert programs == [compiled]


# --- Failures ---------------------------------------------------------------------------------


def test_an_error_names_the_variant_and_holds_the_log(toy: Toy) -> None:
    toy.write("scale.cuh", "__device__ inline float scaled(float x) { return x +; }\n")
    with pytest.raises(CompileError) as caught:
        compile_variant(toy.variant, SM90)
    message = str(caught.value)
    assert message.startswith(f"{toy.variant} for sm_90 did not compile\n")
    assert "scale.cuh(1): error: expected an expression" in message


def test_a_triton_error_names_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = LINEAR_SCAN.kernel("time_last_forward", "triton")
    broken = changed(
        kernel, constants=lambda variant: {**kernel.code.constants(variant), "ROWS": 3}
    )
    family = replace(LINEAR_SCAN, kernels=(broken,))
    monkeypatch.setattr(compiling, "family", lambda name: family)
    with pytest.raises(CompileError) as caught:
        compile_variant(TRITON, SM90)
    assert str(caught.value).startswith(f"{TRITON} for sm_90 did not compile\n")
    assert "power of 2" in str(caught.value)


def test_a_spill_fails_the_build_unless_the_spec_allows_it(toy: Toy) -> None:
    toy.write("copy.cu", SPILL)
    binary, _ = compile_variant(toy.variant, SM90)  # which the JIT takes as it is
    assert binary.spill_bytes is not None
    assert binary.spill_bytes > 0
    with pytest.raises(CompileError, match="spills") as caught:
        refuse_spill(binary)
    assert str(toy.variant) in str(caught.value)
    assert "may_spill" in str(caught.value)
    toy.change(may_spill={toy.variant: binary.spill_bytes - 1})
    with pytest.raises(CompileError, match=f"may spill {binary.spill_bytes - 1};"):
        refuse_spill(binary)
    toy.change(may_spill={toy.variant: binary.spill_bytes})
    refuse_spill(binary)


@pytest.mark.parametrize("arch", ["sm90", "ptx80"])
def test_other_parameters_than_the_specs_fail_the_build(toy: Toy, arch: str) -> None:
    """Also where the binary is from a cache: parameters do not enter what a binary is compiled from."""
    made = compile_variant(toy.variant, Target.parse(arch))
    refuse_parameters(*made)
    toy.change(parameters=(*toy.kernel.parameters, Parameter("n", "i64")))
    with pytest.raises(CompileError, match=r"point toy has 1 parameters, .* the spec 2$") as caught:
        refuse_parameters(*made)
    assert str(toy.variant) in str(caught.value)


@pytest.mark.parametrize("arch", ["sm90", "ptx80"])
def test_parameters_that_the_compiler_adds_do_not_count(arch: str) -> None:
    refuse_parameters(*compile_variant(TRITON, Target.parse(arch)))


def test_a_failure_is_not_kept(toy: Toy, build_cache: Cache) -> None:
    toy.write("scale.cuh", "no function")
    with pytest.raises(CompileError):
        compile_variant(toy.variant, SM90, build_cache)
    assert not list(build_cache.entries())


def test_what_the_compiler_returns_is_looked_at(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    other = nvrtc.Nvrtc().compile(toy.kernel, toy.variant, Target.parse("sm80"), {})
    empty = replace(other, content=b"")
    for result, words in ((other, "returned code for sm_80"), (empty, "returned nothing")):
        monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *_, result=result: result)
        with pytest.raises(CompileError, match=words):
            compile_variant(toy.variant, SM90)


#: Copies with a hint, to one stage or the other for all lanes, which NVRTC 12.9 makes illegal instructions of.
TRAP = """
extern "C" __global__ void toy(float* x) {
    extern __shared__ uint4 ring[];
    unsigned long long hint;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(hint));
    const unsigned own = unsigned(__cvta_generic_to_shared(ring + threadIdx.x));
    for (int i = 0; i < 8 * SCALE; i++)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::
                     "r"(own + i % 2 * 2048), "l"(x + 4 * (i * 128 + threadIdx.x)), "l"(hint) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    x[threadIdx.x] = ring[threadIdx.x ^ 1].x;
}
"""


def test_copies_that_no_gpu_carries_out_are_refused(toy: Toy) -> None:
    toy.write("copy.cu", TRAP)
    assert compile_variant(toy.variant, Target.parse("sm80"))
    with pytest.raises(
        CompileError, match="returned 16 asynchronous copies that no GPU carries out"
    ):
        compile_variant(toy.variant, SM90)


def test_no_nvrtc(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: not here")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    monkeypatch.setattr(nvrtc, "_packaged", lambda folder: iter(()))
    nvrtc._library.cache_clear()
    nvrtc._candidates.cache_clear()
    try:
        with pytest.raises(MissingCompilerError, match="pip install nvidia-cuda-nvrtc"):
            compile_variant(toy.variant, SM90)
    finally:
        nvrtc._candidates.cache_clear()


def test_the_version_that_is_stated_is_the_one_that_compiles(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of the cache is made of the stated one, before anything is loaded."""
    (first, *_) = nvrtc._candidates()
    monkeypatch.setattr(nvrtc, "_candidates", lambda: (replace(first, version="11.8.89"),))
    nvrtc._library.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"nvrtc 11\.8\.89 is installed, but what loads is"):
            compile_variant(toy.variant, SM90)
    finally:
        nvrtc._library.cache_clear()


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingCompilerError, match="pip install triton"):
        compile_variant(TRITON, SM90)
