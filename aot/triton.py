"""Triton kernels, compiled without a GPU and without torch."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scan_registry.aot.toolchain import Compiled, CompileError, MissingCompilerError, Shared
from scan_registry.base.frozen import dataclass
from scan_registry.base.package import NAME
from scan_registry.catalog import distributions
from scan_registry.hardware.target import CudaVersion, Target
from scan_registry.kernels import ROOT
from scan_registry.kernels.model import Kernel, Variant

#: The CUDA release of the assembler in each release of Triton, latest first.
_CUDA_OF_TRITON: tuple[tuple[tuple[int, int], CudaVersion], ...] = (
    ((3, 5), (12, 9)),
    ((3, 3), (12, 8)),
)
#: Architectures for which Triton makes the PTX of another one, but for the line that names the target.
_SAME_PTX = {86: 80, 89: 80, 120: 100}
#: Settings of a user's own kernels, which must not change ours.
_FOREIGN = ("TRITON_", "MLIR_", "LLVM_", "PTXAS_", "DISABLE_PTXAS_OPT", "NVPTX_")

#: How a copy on Hugging Face's Hub writes what ``_IMPORT`` finds. Digests of sources are the same in every copy.
_RELATIVE = re.compile(r"^from \.\.\.kernels\.", re.MULTILINE)
_IMPORT = re.compile(r"^from scan_registry\.kernels\.(\w+)\.(\w+) import", re.MULTILINE)

#: A complex number is two floats to Triton; specs name those.
_POINTER = {
    "float32": "*fp32",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float64": "*fp64",
    "int64": "*i64",
    "uint8": "*u8",
}


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Triton reads its settings from the environment: exactly these hold meanwhile.

    Only for processes that do nothing else: wheel builds, and the worker of the JIT.
    """
    before = dict(os.environ)
    for name in before:
        if name.startswith(_FOREIGN):
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def _words(error: BaseException | None) -> str:
    """The error and its causes: of nested functions, only the innermost says what is wrong."""
    words = []
    while error is not None:
        words.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(words)


@contextmanager
def _own_settings() -> Iterator[None]:
    """Triton's own cache is keyed by paths; ours is not, so its folder is thrown away. With line
    information the code would embed the source's path, and differ from folder to folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _environment(TRITON_CACHE_DIR=folder, TRITON_DISABLE_LINE_INFO="1"),
    ):
        yield


@dataclass(frozen=True)
class _Output:
    """What Triton makes for one architecture: PTX, the machine code that it gives, and what is known
    of both."""

    ptx: str
    cubin: bytes
    metadata: Any  # triton ships no type information


def _options(kernel: Kernel, variant: Variant) -> dict[str, Any]:
    return {"num_warps": kernel.code.warps(variant), "enable_fp_fusion": kernel.code.fuses(variant)}


def _compile(kernel: Kernel, variant: Variant, target: Target, shared: Shared) -> _Output:
    with _own_settings():
        try:
            import triton
            from triton.backends.compiler import GPUTarget
        except ImportError as error:
            raise MissingCompilerError(
                f"Triton is not installed; `pip install triton` gives it ({error})"
            ) from error
        try:
            compiled = triton.compile(
                _source(kernel, variant, shared),
                target=GPUTarget("cuda", target.number, 32),
                options=_options(kernel, variant),
            )
        except Exception as error:  # Triton raises many kinds; each is a failed compile
            raise CompileError(_words(error)) from error
    return _Output(compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata)


def _assembled(kernel: Kernel, variant: Variant, target: Target, like: _Output) -> _Output:
    """The same for an architecture with the same PTX, by the last of Triton's steps alone."""
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    from scan_registry.aot import ptxas

    ptx = ptxas.retargeted(like.ptx.encode(), target).decode()
    steps: dict[str, Any] = {}
    with _own_settings():
        try:
            backend = make_backend(GPUTarget("cuda", target.number, 32))
            options = backend.parse_options(_options(kernel, variant))
            backend.add_stages(steps, options, Language.TRITON)
            cubin = steps["cubin"](ptx, {})
        except Exception as error:  # Triton raises many kinds; each is a failed compile
            raise CompileError(_words(error)) from error
    return _Output(ptx, cubin, like.metadata)


def _source(kernel: Kernel, variant: Variant, shared: Shared) -> Any:
    """The kernel's function with its signature, constants and promises of divisibility.

    Its translation to Triton's first form knows no architecture, so one serves all of them.
    """
    from triton.compiler import ASTSource

    class Source(ASTSource):  # type: ignore[misc]  # triton ships no type information
        def make_ir(self, *arguments: Any) -> Any:
            context = arguments[-1]
            if "ttir" not in shared:
                ttir = super().make_ir(*arguments)
                shared["ttir"] = str(ttir)
                return ttir
            from triton._C.libtriton import ir

            with tempfile.NamedTemporaryFile("w", suffix=".ttir", encoding="utf-8") as file:
                file.write(shared["ttir"])
                file.flush()
                module = ir.parse_mlir_module(file.name, context)
            module.context = context  # which has to live as long
            return module

    module = importlib.import_module(
        f"{NAME}.kernels.{kernel.family}.{kernel.code.source.removesuffix('.py')}"
    )
    constants = dict(kernel.code.constants(variant))
    elements = kernel.code.elements(variant)
    signature = {
        p.name: _POINTER[elements[p.name]] if p.kind == "pointer" else "i64"
        for p in kernel.parameters
    }
    divisible = kernel.code.divisible(variant)
    return Source(
        fn=getattr(module, kernel.code.entry),
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, p in enumerate(kernel.parameters)
            if p.name in divisible
        },
    )


class Triton:
    """The Triton compiler."""

    def identity(self) -> str:
        version = distributions.version("triton")
        if version is None:
            raise MissingCompilerError("Triton is not installed; `pip install triton` gives it")
        return f"triton {version}"

    def cuda(self) -> CudaVersion:
        release = tuple(map(int, self.identity().removeprefix("triton ").split(".")[:2]))
        return next((cuda for first, cuda in _CUDA_OF_TRITON if release >= first), (12, 4))

    def sources(self, kernel: Kernel) -> Mapping[str, str]:
        texts: dict[str, str] = {}
        pending = [(kernel.family, kernel.code.source)]
        while pending:
            family, source = pending.pop()
            name = source if family == kernel.family else f"{family}/{source}"
            if name not in texts:
                text = (ROOT / family / source).read_text(encoding="utf-8")
                texts[name] = _RELATIVE.sub("from scan_registry.kernels.", text)
                pending += [(of, f"{module}.py") for of, module in _IMPORT.findall(texts[name])]
        return texts

    def options(self, kernel: Kernel, variant: Variant, target: Target) -> tuple[str, ...]:
        constants = kernel.code.constants(variant)
        return (
            f"target=cuda:{target.number}",
            f"pointers={'+'.join(kernel.code.elements(variant).values())}",
            f"num_warps={kernel.code.warps(variant)}",
            f"enable_fp_fusion={kernel.code.fuses(variant)}",
            f"divisible_by_16={'+'.join(sorted(kernel.code.divisible(variant)))}",
            *(f"{name}={value}" for name, value in constants.items()),
        )

    def compile(self, kernel: Kernel, variant: Variant, target: Target, shared: Shared) -> Compiled:
        key = f"sm_{target.number}"  # machine code and PTX of one architecture are made together
        like = shared.get(f"sm_{_SAME_PTX.get(target.number)}")
        if key not in shared and like is not None:
            shared[key] = _assembled(kernel, variant, target, like)
        elif key not in shared:
            shared[key] = _compile(kernel, variant, target, shared)
        compiled: _Output = shared[key]
        metadata = compiled.metadata
        if target.is_ptx:
            content, form, made_for = compiled.ptx.encode(), "ptx", target
        else:
            # From 9.0 up Triton aims at the architecture-specific target.
            suffix = "a" if target.number >= 90 else ""
            content, form = compiled.cubin, "cubin"
            made_for = Target(target.capability, suffix=suffix)
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise CompileError(
                "the kernel wants a scratch buffer, which the launcher does not give"
            )
        return Compiled(
            content=content,
            target=made_for,
            format=form,
            entry=metadata.name,
            block=(32 * metadata.num_warps, 1, 1),
            cluster=(1, 1, 1),
            dynamic_shared=metadata.shared,
            # global_scratch and profile_scratch follow the parameters; both are of size 0 here.
            hidden=2,
            log="",
        )
