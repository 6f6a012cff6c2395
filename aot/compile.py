"""Compile one variant for one architecture: the function behind wheels and the JIT alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from scan_registry.aot import elf
from scan_registry.aot.cache import BuildCache
from scan_registry.aot.nvrtc import Nvrtc
from scan_registry.aot.toolchain import CompileError, Compiler
from scan_registry.aot.triton import Triton
from scan_registry.archive import Binary, digest
from scan_registry.kernels import family
from scan_registry.kernels.model import Kernel, Language, Variant
from scan_registry.target import Target

COMPILERS: Mapping[Language, Compiler] = {"cuda": Nvrtc(), "triton": Triton()}


def source_digest(sources: Mapping[str, str]) -> str:
    """SHA-256 over file names and texts; neither paths nor times enter."""
    return digest(json.dumps(sorted(sources.items())).encode())


def cache_key(
    compiler: str,
    source_sha256: str,
    entry: str,
    options: tuple[str, ...],
    target: Target,
    variant: Variant,
    warps: int,
) -> str:
    """What determines a binary and its launch, and nothing else."""
    parts = [compiler, source_sha256, entry, list(options), str(target), str(variant), warps]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def compile_variant(
    variant: Variant, target: Target, cache: BuildCache | None = None
) -> tuple[Binary, bytes]:
    """Compile ``variant`` for ``target``, or take it from ``cache``.

    ``CompileError`` names the variant and holds the compiler's log; a kernel that spills registers
    without the spec's leave is an error too, and so is a cubin of another architecture.
    """
    kernel = family(variant.family).kernel(variant.kernel, variant.language)
    compiler = COMPILERS[variant.language]
    source_sha256 = source_digest(compiler.sources(kernel))
    options = compiler.options(kernel, variant, target)
    identity = compiler.identity()
    key = cache_key(
        identity, source_sha256, kernel.entry, options, target, variant, kernel.warps(variant)
    )
    if cache is not None and (hit := cache.get(key, target)) is not None:
        _check_spill(kernel, hit[0], target)  # the spec may have taken its leave back
        return hit
    try:
        compiled = compiler.compile(kernel, variant, target)
    except CompileError as error:
        raise type(error)(f"{variant} for {target} did not compile\n{error}") from error
    if not compiled.content:
        raise CompileError(f"{variant} for {target}: {identity} returned nothing")
    resources = None
    if compiled.format == "cubin":
        if elf.arch_number(compiled.content) != target.number:
            raise CompileError(f"{variant} for {target}: {identity} made code for another target")
        resources = elf.resources(compiled.content, compiled.entry)
    binary = Binary(
        variant=variant,
        target=compiled.target,
        format=compiled.format,
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
        compiler=identity,
        options=options,
        source_sha256=source_sha256,
    )
    _check_spill(kernel, binary, target)
    if cache is not None:
        cache.put(key, target, binary, compiled.content)
    return binary, compiled.content


def _check_spill(kernel: Kernel, binary: Binary, target: Target) -> None:
    if binary.spill_bytes and binary.variant not in kernel.may_spill:
        raise CompileError(
            f"{binary.variant} for {target} spills {binary.spill_bytes} bytes per thread "
            f"({binary.registers} registers); shrink its tile, or list it in the spec's may_spill"
        )
