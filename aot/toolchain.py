"""What every compiler of the toolchain offers, and the errors they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from scan_registry.base.frozen import dataclass
from scan_registry.hardware.target import CudaVersion, Target
from scan_registry.kernels.model import Kernel, Variant

#: What a compiler leaves, under names of its own, from one architecture for the next ones of the same
#: variant. It saves time and changes no byte.
Shared: TypeAlias = dict[str, Any]


class CompileError(Exception):
    """A variant that did not compile; the message holds the compiler's log."""


class MissingCompilerError(CompileError):
    """A compiler that is not installed; the message names the package that gives it."""


@dataclass(frozen=True)
class Compiled:
    """What a compiler returns: bytes, and what a launch has to know of them."""

    content: bytes
    target: Target
    format: str
    entry: str
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    hidden: int
    log: str


class Compiler(Protocol):
    """One language's compiler. ``options`` are all that shapes its output beside the sources."""

    def identity(self) -> str:
        """Name and exact version; ``MissingCompilerError`` if it is not installed.

        Cheap: a warm start asks, and compiles nothing.
        """

    def cuda(self) -> CudaVersion:
        """The CUDA release whose architectures it knows."""

    def sources(self, kernel: Kernel) -> Mapping[str, str]:
        """File name to text of everything that the kernel's compilation reads."""

    def options(self, kernel: Kernel, variant: Variant, target: Target) -> tuple[str, ...]:
        """In the order and spelling that the manifest records."""

    def compile(self, kernel: Kernel, variant: Variant, target: Target, shared: Shared) -> Compiled:
        """Compile; ``CompileError`` holds the log. ``shared`` is empty, or what this has left in it."""
