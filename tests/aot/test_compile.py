"""Compiling one variant: what comes out, errors, spills, and the build cache."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scan_registry import archive
from scan_registry.aot import build, elf, nvrtc, ptxas
from scan_registry.aot.compile import compile_variant, refuse_spill
from scan_registry.aot.plan import Job
from scan_registry.aot.toolchain import CompileError, MissingCompilerError
from scan_registry.archive import Archive, digest
from scan_registry.cache import Cache
from scan_registry.kernels import families, family
from scan_registry.kernels.model import Family, Kernel, Launch, Parameter, Space, Variant
from scan_registry.target import RELEASED, Target

# The module, which the package's attribute of this name may hide behind a function one day.
compiling = importlib.import_module("scan_registry.aot.compile")

SM90 = Target.parse("sm90")
LINEAR_SCAN = family("linear_scan")
CUDA = LINEAR_SCAN.kernel("time_last_forward", "cuda").variants[0]
TRITON = LINEAR_SCAN.kernel("time_last_forward", "triton").variants[0]

COPY = """
#include "scale.cuh"
extern "C" __global__ void toy(float* x) { x[threadIdx.x] = scaled(x[threadIdx.x]); }
"""
HEADER = "__device__ inline float scaled(float x) { return SCALE * x; }\n"
#: Keeps 96 numbers alive across a barrier, with leave for 32 registers.
SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 2) toy(float* x) {
    float kept[96];
#pragma unroll
    for (int i = 0; i < 96; i++) kept[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = kept[i] * kept[95 - i] * SCALE;
}
"""


class Toy:
    """A family of one CUDA kernel, whose files and spec a test changes at will."""

    variant = Variant("toy", "copy", "cuda", (("dtype", "float32"), ("scale", 2)))

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernel = Kernel(
            family="toy",
            name="copy",
            language="cuda",
            source="copy.cu",
            entry="toy",
            parameters=(Parameter("x", "pointer"),),
            defaults=Space((self.variant.statics,), lambda kind: ((),)),
            constants=lambda variant: {"SCALE": variant.number("scale")},
            warps=lambda variant: 4,
            accepts=lambda variant, problem: None,
            cost=lambda variant, problem: 0.0,
            launch=lambda variant, problem, multiprocessors: Launch((1, 1, 1), {}),
        )
        self.write("copy.cu", COPY)
        self.write("scale.cuh", HEADER)

    def write(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def change(self, **changes: Any) -> None:
        self.kernel = replace(self.kernel, **changes)

    def family(self, name: str) -> Family:
        assert name == "toy"
        return Family("toy", "y = scale * x", self.folder, (self.kernel,))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    made = Toy(tmp_path / "kernels" / "toy")
    monkeypatch.setattr(nvrtc, "ROOT", tmp_path / "kernels")
    monkeypatch.setattr(compiling, "family", made.family)
    return made


@pytest.fixture
def build_cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever NVRTC is run."""
    run: list[str] = []
    original = nvrtc.Nvrtc.compile

    def counted(self: nvrtc.Nvrtc, kernel: Kernel, variant: Variant, *rest: Any) -> Any:
        run.append(str(variant))
        return original(self, kernel, variant, *rest)

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", counted)
    return run


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


def test_cubins_are_of_the_elf_abi_that_old_drivers_load() -> None:
    """ABI 7 up to sm_90; a driver of CUDA 12 refuses ABI 8."""
    for variant in (CUDA, TRITON):
        assert compile_variant(variant, SM90)[1][8] == 7


@pytest.mark.parametrize(
    ("arch", "made_for"), [("sm80", "sm_80"), ("sm90", "sm_90a"), ("ptx80", "compute_80")]
)
def test_triton(arch: str, made_for: str) -> None:
    binary, content = compile_variant(TRITON, Target.parse(arch))
    assert (str(binary.target), binary.hidden) == (made_for, 2)
    kernel = LINEAR_SCAN.kernel("time_last_forward", "triton")
    assert binary.block == (32 * kernel.warps(TRITON), 1, 1)
    assert binary.entry.encode() in content
    assert binary.compiler.startswith("triton ")
    # Without line information nothing of the source's place gets into the code.
    assert b"triton_kernels" not in content


def test_triton_leaves_the_environment_as_it_was() -> None:
    """A user's own Triton kernels, compiled later in the same process, must not notice."""
    before = dict(os.environ)
    compile_variant(TRITON, SM90)
    assert dict(os.environ) == before


def test_triton_does_not_see_a_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    binary, _ = compile_variant(TRITON, SM90)
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nowhere/ptxas")
    monkeypatch.setenv("PTXAS_OPTIONS", "-O0")
    assert compile_variant(TRITON, SM90)[0] == binary


RELEASES = [Target.parse(arch) for arch in RELEASED]
#: Those for which NVRTC makes the same PTX.
LIKE_80 = [Target.parse(arch) for arch in ("sm80", "sm86", "sm89", "sm90", "ptx80")]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that NVRTC compiles for, from the source on."""
    run: list[str] = []
    images = nvrtc.Nvrtc._images

    def recorded(self: nvrtc.Nvrtc, kernel: Kernel, variant: Variant, target: Target) -> Any:
        run.append(str(target))
        return images(self, kernel, variant, target)

    monkeypatch.setattr(nvrtc.Nvrtc, "_images", recorded)
    return run


@pytest.mark.parametrize(
    "kernel",
    [
        kernel
        for each in families().values()
        for kernel in each.kernels
        if kernel.language == "cuda"
    ],
    ids=lambda kernel: kernel.head,
)
def test_what_architectures_share_changes_no_byte(kernel: Kernel, programs: list[str]) -> None:
    """Of one variant of each kernel in CUDA C++."""
    variant = next(
        v for v in kernel.variants if all(kernel.serves(v.statics, each) for each in LIKE_80)
    )
    alone = [compile_variant(variant, target) for target in LIKE_80]
    programs.clear()
    shared: dict[str, Any] = {}
    assert [compile_variant(variant, target, None, shared) for target in LIKE_80] == alone
    assert programs == ["sm_80"]  # its PTX is a by-product of its machine code


def test_what_architectures_share_of_triton_changes_no_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = [compile_variant(TRITON, target) for target in RELEASES]
    lowered: list[str] = []
    generator = importlib.import_module("triton.compiler.code_generator")
    backend = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    for where, step in ((generator, "ast_to_ttir"), (backend, "make_llir")):
        original = getattr(where, step)

        def counted(*given: Any, _of: Any = (step, original), **named: Any) -> Any:
            lowered.append(_of[0])
            return _of[1](*given, **named)

        monkeypatch.setattr(where, step, counted)
    shared: dict[str, Any] = {}
    assert [compile_variant(TRITON, target, None, shared) for target in RELEASES] == alone
    # 8.6 and 8.9 have the PTX of 8.0, and 12.0 that of 10.0.
    assert (lowered.count("ast_to_ttir"), lowered.count("make_llir")) == (1, 3)


@pytest.mark.parametrize(
    "reason", ["it asks", "no assembler", "a suffix", "another order", "later ones"]
)
def test_what_is_compiled_for_each_architecture(
    reason: str, toy: Toy, programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the PTX of 8.0 would not do, or is not there, or nothing assembles it: as alone."""
    targets = [Target.parse(arch) for arch in ("sm80", "sm89", "sm90")]
    if reason == "it asks":
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


def test_a_build_begins_with_what_others_share(
    tmp_path: Path, programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever order architectures are named."""
    archs = [Target.parse(arch) for arch in ("ptx80", "sm90", "sm86", "sm80")]
    jobs = [Job(CUDA, arch) for arch in archs]
    made = build._compile(jobs, None)
    assert {job.arch for job in made} == {*archs}
    assert programs == ["sm_80"]


# --- Failures ---------------------------------------------------------------------------------


def test_an_error_names_the_variant_and_holds_the_log(toy: Toy) -> None:
    toy.write("scale.cuh", "__device__ inline float scaled(float x) { return x +; }\n")
    with pytest.raises(CompileError) as caught:
        compile_variant(toy.variant, SM90)
    message = str(caught.value)
    assert message.startswith(f"{toy.variant} for sm_90 did not compile\n")
    assert "scale.cuh(1): error: expected an expression" in message


def test_a_missing_header(toy: Toy) -> None:
    (toy.folder / "scale.cuh").unlink()
    with pytest.raises(FileNotFoundError, match=r"scale\.cuh"):
        compile_variant(toy.variant, SM90)


def test_an_architecture_that_the_compiler_does_not_know(toy: Toy) -> None:
    with pytest.raises(CompileError, match="for sm_13 did not compile"):
        compile_variant(toy.variant, Target.parse("sm13"))


def test_a_triton_error_names_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = LINEAR_SCAN.kernel("time_last_forward", "triton")
    broken = replace(kernel, constants=lambda variant: {**kernel.constants(variant), "ROWS": 3})
    changed = replace(LINEAR_SCAN, kernels=(broken,))
    monkeypatch.setattr(compiling, "family", lambda name: changed)
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
    toy.change(may_spill=frozenset({toy.variant}))
    refuse_spill(binary)


def test_a_failure_is_not_kept(toy: Toy, build_cache: Cache) -> None:
    toy.write("scale.cuh", "no function")
    with pytest.raises(CompileError):
        compile_variant(toy.variant, SM90, build_cache)
    assert not list(build_cache.entries())


def test_nothing_is_not_a_binary(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    original = nvrtc.Nvrtc.compile
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *args: replace(original(*args), content=b""))
    with pytest.raises(CompileError, match="returned nothing"):
        compile_variant(toy.variant, SM90)


def test_code_for_another_architecture_is_refused(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = nvrtc.Nvrtc().compile(toy.kernel, toy.variant, Target.parse("sm80"), {})
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *args: other)
    with pytest.raises(CompileError, match="returned code for sm_80"):
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


# --- The cache --------------------------------------------------------------------------------


def test_a_hit_is_the_same_binary(toy: Toy, build_cache: Cache, compiles: list[str]) -> None:
    first = compile_variant(toy.variant, SM90, build_cache)
    assert compile_variant(toy.variant, SM90, build_cache) == first
    assert len(compiles) == 1
    assert compile_variant(toy.variant, SM90) == first  # and so is one compiled anew
    assert len(compiles) == 2


@pytest.mark.parametrize("damage", [b"", b"garbage", "cut", "flip"])
def test_a_damaged_entry_is_built_again(
    toy: Toy, build_cache: Cache, compiles: list[str], damage: Any
) -> None:
    first = compile_variant(toy.variant, SM90, build_cache)
    (entry,) = build_cache.folder.rglob(f"*{archive.SUFFIX}")
    whole = entry.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    entry.write_bytes({"cut": whole[:-1], "flip": flipped}.get(damage, damage))
    assert compile_variant(toy.variant, SM90, build_cache) == first
    assert len(compiles) == 2
    assert entry.read_bytes() == whole
    assert compile_variant(toy.variant, SM90, build_cache) == first
    assert len(compiles) == 2


Change = Callable[[Toy, pytest.MonkeyPatch], "tuple[Variant, Target] | None"]


def change_source(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.write("copy.cu", f"{COPY}// changed\n")


def change_header(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.write("scale.cuh", f"{HEADER}// changed\n")


def change_header_of_header(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.write("scale.cuh", f'#include "more.cuh"\n{HEADER}')
    toy.write("more.cuh", "// changed\n")


def change_file_name(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.write("copy2.cu", COPY)
    toy.change(source="copy2.cu")


def change_entry(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both are in the source, so that nothing changes but which one is meant.
    toy.change(entry="other")


def change_constant(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.change(constants=lambda variant: {"SCALE": 3})


def change_constant_name(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.change(constants=lambda variant: {"SCALE": 2, "MORE": 1})


def change_warps(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.change(warps=lambda variant: 8)


def change_compiler(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    library, _ = nvrtc._library()
    monkeypatch.setattr(nvrtc, "_library", lambda: (library, "12.9.87"))
    monkeypatch.setattr(nvrtc.Nvrtc, "identity", lambda self: "nvrtc 12.9.87")


def change_target(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> tuple[Variant, Target]:
    return toy.variant, Target.parse("sm90a")


def change_format(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> tuple[Variant, Target]:
    return toy.variant, Target.parse("ptx90")


@pytest.mark.parametrize(
    "change",
    [
        change_source,
        change_header,
        change_header_of_header,
        change_file_name,
        change_entry,
        change_constant,
        change_constant_name,
        change_warps,
        change_compiler,
        change_target,
        change_format,
    ],
    ids=lambda change: change.__name__.removeprefix("change_"),
)
def test_whatever_determines_a_binary_is_in_its_key(
    change: Change,
    toy: Toy,
    build_cache: Cache,
    compiles: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy.write("copy.cu", COPY + COPY.replace("toy", "other").replace("#include", "//"))
    first, _ = compile_variant(toy.variant, SM90, build_cache)
    variant, target = change(toy, monkeypatch) or (toy.variant, SM90)
    second, _ = compile_variant(variant, target, build_cache)
    assert len(compiles) == 2, "the cache gave a binary that was made for something else"
    assert second != first
    # A cached copy of the changed one is as good as compiling it.
    assert compile_variant(variant, target, build_cache)[0] == second
    assert len(compiles) == 2


def test_what_does_not_determine_a_binary_is_not_in_its_key(
    toy: Toy, build_cache: Cache, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_variant(toy.variant, SM90, build_cache)
    elsewhere = toy.folder.parent.with_name("elsewhere")
    shutil.move(toy.folder.parent, elsewhere)
    toy.folder = elsewhere / "toy"
    monkeypatch.setattr(nvrtc, "ROOT", elsewhere)
    os.utime(toy.folder / "copy.cu", (0, 0))
    toy.write("unrelated.cuh", "// not included by anything")
    toy.change(cost=lambda variant, problem: 1.0)
    assert compile_variant(toy.variant, SM90, build_cache) == first
    assert len(compiles) == 1


def test_an_optional_variant_may_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out, and that is said; another one that fails ends the build."""
    bad = Variant.parse(str(CUDA).replace("warps=1", "warps=3"))

    def planned(*jobs: Job) -> None:
        monkeypatch.setattr(build, "plan", lambda archs: {SM90: jobs})

    planned(Job(CUDA, SM90), Job(bad, SM90, optional=True))
    (path,) = build.build_archives(tmp_path / "out", [SM90], tmp_path / "cache", {})
    assert [binary.variant for binary in Archive(path).binaries] == [CUDA]
    assert f"sm90: left out: {bad} for sm_90 did not compile" in capsys.readouterr().err
    planned(Job(CUDA, SM90), Job(bad, SM90))
    with pytest.raises(CompileError, match="did not compile"):
        build.build_archives(tmp_path / "out", [SM90], tmp_path / "cache", {})


def test_an_optional_variant_that_no_such_gpu_has_room_for_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sm89 = Target.parse("sm89")
    kernel = family("linear_scan").kernel("channel_last_forward", "cuda")
    large = next(each for each in kernel.every if kernel.shared(each) > 101_376)
    jobs = (Job(CUDA, sm89), Job(large, sm89, optional=True))
    monkeypatch.setattr(build, "plan", lambda archs: {sm89: jobs})
    (path,) = build.build_archives(tmp_path / "out", [sm89], tmp_path / "cache", {})
    assert [binary.variant for binary in Archive(path).binaries] == [CUDA]
    words = capsys.readouterr().err
    assert f"sm89: left out: {large}" in words
    assert "bytes of shared memory per block; sm_89 has 101376" in words
