"""Compile one variant for one architecture: the function behind wheels and the JIT alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from scan_registry.aot.nvrtc import Nvrtc
from scan_registry.aot.toolchain import Compiled, CompileError, Compiler, Shared
from scan_registry.aot.triton import Triton
from scan_registry.artifact.archive import Binary, digest
from scan_registry.base.frozen import dataclass
from scan_registry.cache.store import Cache
from scan_registry.hardware.target import Target
from scan_registry.kernels import family
from scan_registry.kernels.model import Kernel, Language, Variant

COMPILERS: Mapping[Language, Compiler] = {"cuda": Nvrtc(), "triton": Triton()}


@dataclass(frozen=True)
class Recipe:
    """All that determines a binary and its launch; ``key`` is its digest, and holds nothing else."""

    variant: Variant
    target: Target
    compiler: str
    source_sha256: str
    entry: str
    options: tuple[str, ...]
    warps: int

    @property
    def key(self) -> str:
        parts = [
            self.compiler,
            self.source_sha256,
            self.entry,
            list(self.options),
            str(self.target),
            str(self.variant),
            self.warps,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def source_digest(sources: Mapping[str, str]) -> str:
    """SHA-256 over file names and texts; neither paths nor times enter."""
    return digest(json.dumps(sorted(sources.items())).encode())


def _kernel(variant: Variant) -> Kernel:
    return family(variant.family).kernel(variant.kernel, variant.language)


def recipe(variant: Variant, target: Target) -> Recipe:
    """What compiling ``variant`` for ``target`` here and now would depend on; compiles nothing.

    ``MissingCompilerError`` if the language's compiler is not installed.
    """
    kernel, compiler = _kernel(variant), COMPILERS[variant.language]
    return Recipe(
        variant=variant,
        target=target,
        compiler=compiler.identity(),
        source_sha256=source_digest(compiler.sources(kernel)),
        entry=kernel.code.entry,
        options=compiler.options(kernel, variant, target),
        warps=kernel.code.warps(variant),
    )


def compile_variant(
    variant: Variant, target: Target, cache: Cache | None = None, shared: Shared | None = None
) -> tuple[Binary, bytes]:
    """Compile ``variant`` for ``target``, or take it from ``cache``.

    Calls for several targets of the same variant are faster with the same ``shared``, a dictionary
    that is empty at first, and fastest in the order of capabilities, with PTX after machine code of the same one.
    ``CompileError`` names the variant and holds the compiler's log; a cubin of another architecture
    is one, too.
    """
    made_of = recipe(variant, target)
    if cache is None:
        return _compile(made_of, shared)
    return cache.obtain(made_of.key, target, lambda: _compile(made_of, shared))


def _compile(made_of: Recipe, shared: Shared | None = None) -> tuple[Binary, bytes]:
    variant, target = made_of.variant, made_of.target
    subject = f"{variant} for {target}"
    compiler = COMPILERS[variant.language]
    try:
        compiled = compiler.compile(
            _kernel(variant), variant, target, {} if shared is None else shared
        )
    except CompileError as error:
        raise type(error)(f"{subject} did not compile\n{error}") from error
    try:
        return _describe(made_of, compiled), compiled.content
    except ValueError as error:
        raise CompileError(f"{subject}: {made_of.compiler} returned {error}") from error


def _describe(made_of: Recipe, compiled: Compiled) -> Binary:
    """The manifest's entry; ``ValueError`` where what the compiler returned is not what it was asked."""
    from scan_registry.aot import elf, image  # a warm start of the JIT describes nothing

    if not compiled.content:
        raise ValueError("nothing")
    resources = None
    if compiled.format == "cubin":
        if elf.arch_number(compiled.content) != made_of.target.number:
            raise ValueError(f"code for sm_{elf.arch_number(compiled.content)}")
        resources = elf.resources(compiled.content, compiled.entry)
        if copies := elf.illegal_copies(compiled.content, compiled.entry):
            raise ValueError(
                f"{copies} asynchronous copies that no GPU carries out, as their descriptor is in the wrong "
                "register; a shared address without a part that all lanes have in common avoids that"
            )
        form = image.of_cubin(compiled.content, compiled.target)
    else:
        form = image.of_ptx(compiled.content)
    return Binary(
        variant=made_of.variant,
        target=compiled.target,
        format=compiled.format,
        format_version=form.version,
        oldest_driver=form.oldest_driver,
        entry=compiled.entry,
        block=compiled.block,
        cluster=compiled.cluster,
        dynamic_shared=compiled.dynamic_shared,
        hidden=compiled.hidden,
        registers=resources.registers if resources else None,
        static_shared=resources.static_shared if resources else None,
        spill_bytes=resources.stack if resources else None,
        size=len(compiled.content),
        sha256=digest(compiled.content),
        compiler=made_of.compiler,
        options=made_of.options,
        source_sha256=made_of.source_sha256,
    )


def refuse_spill(binary: Binary) -> None:
    """``CompileError`` if a binary spills more registers than its spec allows.

    A gate for wheels. On hardware that no wheel was built for, a spilled kernel beats none.
    """
    most = _kernel(binary.variant).code.may_spill.get(binary.variant, 0)
    if (binary.spill_bytes or 0) > most:
        raise CompileError(
            f"{binary} spills {binary.spill_bytes} bytes per thread ({binary.registers} registers), and may spill "
            f"{most}; shrink its tile, or list it in the spec's may_spill"
        )


def refuse_parameters(binary: Binary, content: bytes) -> None:
    """``CompileError`` if a kernel's entry point does not have as many parameters as its spec.

    A launch would read arguments that are not there. A gate for builds: for what they take from their cache, too.
    """
    from scan_registry.aot import image

    count = image.parameters(content, binary.entry, binary.format)
    stated = len(_kernel(binary.variant).parameters)
    if count and count != stated + binary.hidden:
        raise CompileError(
            f"{binary}: the entry point {binary.entry} has {count - binary.hidden} parameters, "
            f"`parameters` of the kernel in the spec {stated}"
        )
