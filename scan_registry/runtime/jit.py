"""Compiling here, for hardware that no wheel was built for: the wheels' compile function, and a cache.

Nothing is imported or loaded before something has to be compiled: what compilers there are is read
from the versions of installed packages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache

from scan_registry.aot.toolchain import CompileError, MissingCompilerError
from scan_registry.artifact.archive import Binary
from scan_registry.base.frozen import dataclass
from scan_registry.cache.store import jit_cache
from scan_registry.dispatch.fit import Toolchain
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Language, Variant

__all__ = ["CompileError", "Compiled", "compile", "toolchains"]


@dataclass(frozen=True)
class Compiled:
    """A binary that was compiled here, now or earlier, and the milliseconds that it took now."""

    binary: Binary
    content: bytes
    milliseconds: float
    cached: bool


@cache
def toolchains() -> Mapping[Language, Toolchain | str]:
    """The compiler of each language, or which package would bring it."""
    from scan_registry.aot.compile import COMPILERS

    by_language: dict[Language, Toolchain | str] = {}
    for language, compiler in COMPILERS.items():
        try:
            by_language[language] = Toolchain(compiler.identity(), compiler.cuda())
        except MissingCompilerError as error:
            by_language[language] = str(error)
    return by_language


def compile(variant: Variant, target: Target, *, alone: bool = False) -> Compiled:
    """The variant compiled for the target, out of the cache if it is there. ``alone`` says that this
    process does nothing else.

    ``CompileError`` names the variant and holds the compiler's log.
    """
    from scan_registry.aot.compile import compile_variant, recipe
    from scan_registry.aot.worker import compile_apart

    compiled: list[str] = []

    def make() -> tuple[Binary, bytes]:
        compiled.append(variant.language)
        # Triton's settings are the whole process's, so it gets a process of its own.
        apart = variant.language == "triton" and not alone
        return (compile_apart if apart else compile_variant)(variant, target)

    started = time.perf_counter()
    binary, content = jit_cache().obtain(recipe(variant, target).key, target, make)
    milliseconds = 1e3 * (time.perf_counter() - started)
    return Compiled(binary, content, milliseconds, cached=not compiled)
