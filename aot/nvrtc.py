"""CUDA C++ through NVRTC, called by ctypes: no GPU, no driver, no CUDA headers, no host compiler.

Plain ctypes rather than cuda-bindings, because the same code then drives the pinned NVRTC of a
wheel build and whichever NVRTC (12 or 13) torch has brought on a user's machine.
"""

from __future__ import annotations

import ctypes
import importlib.util
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import replace
from functools import cache
from glob import escape, glob
from pathlib import Path

from scan_registry.aot.toolchain import Compiled, CompileError, MissingCompilerError, Shared
from scan_registry.base.frozen import dataclass
from scan_registry.catalog import distributions
from scan_registry.hardware.target import CudaVersion, Target
from scan_registry.kernels import ROOT
from scan_registry.kernels.model import Kernel, Variant

#: NVRTC's PTX for this architecture is also that of the others, unless the source tests ``__CUDA_ARCH__`` with
#: different outcomes.
_PORTABLE = Target((8, 0), "compute")
_LIKE_80 = (86, 89, 90)
_ASKS = re.compile(r"__CUDA_ARCH(?!_FEAT_)(?:__ (==|>=) (\d+)\b)?")
_COMPARED = {"==": operator.eq, ">=": operator.ge}

#: Not anchored to the start of a line: that would be slower, and each process that finds its kernels in the cache
#: searches.
_INCLUDE = re.compile(r'#include\s+"([^"]+)"')


@dataclass(frozen=True)
class _Library:
    """An NVRTC that may be loaded: its file, and its version as far as it is known beforehand."""

    file: str
    version: str | None = None


def _packaged(folder: Path) -> Iterator[_Library]:
    """Those in one ``nvidia`` folder of this environment."""
    for file in glob(f"{escape(str(folder))}/*/lib/libnvrtc.so.*"):
        major = file.rpartition(".")[2]
        for package in (f"nvidia-cuda-nvrtc-cu{major}", "nvidia-cuda-nvrtc"):
            version = distributions.version(package)
            if version is not None and version.split(".")[0] == major:
                yield _Library(file, version)
                break
        else:
            yield _Library(file)


@cache
def _candidates() -> tuple[_Library, ...]:
    """The environment's own, oldest major version first; then whatever the system has.

    An older compiler's binaries load on older drivers, and versions that the packages state spare a
    warm start the loading of a library of 100 MB.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    packaged = [library for folder in folders or () for library in _packaged(Path(folder))]
    packaged.sort(key=lambda library: Path(library.file).name)
    names = ("libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so")
    return (*packaged, *map(_Library, names))


def _load_builtins(library: _Library, release: str) -> None:
    """NVRTC opens a second library by its bare name when it compiles. The folder that both are in need not
    be among those that are searched, but what is loaded already is found by that name."""
    beside = Path(library.file).with_name(f"libnvrtc-builtins.so.{release}")
    if beside.is_absolute():
        with suppress(OSError):  # not there: NVRTC says what it misses
            ctypes.CDLL(str(beside), mode=ctypes.RTLD_GLOBAL)


@cache
def _library() -> tuple[ctypes.CDLL, str]:
    """The first that can be loaded, and its version."""
    for candidate in _candidates():
        try:
            library = ctypes.CDLL(candidate.file)
        except OSError:
            continue
        major, minor = c_int(), c_int()
        if library.nvrtcVersion(byref(major), byref(minor)):
            continue
        version = f"{major.value}.{minor.value}"
        _load_builtins(candidate, version)
        stated = candidate.version or ""
        return library, stated if f"{stated}.".startswith(f"{version}.") else version
    raise MissingCompilerError(
        "NVRTC is not installed; `pip install nvidia-cuda-nvrtc-cu12` gives it"
    )


def _check(status: int, log: str = "") -> None:
    if status:
        library, _ = _library()
        library.nvrtcGetErrorString.restype = c_char_p
        raise CompileError(f"{library.nvrtcGetErrorString(status).decode()}\n{log}".strip())


def _fetch(program: c_void_p, what: str) -> bytes:
    """One of the byte strings that NVRTC hands out as a size and a copy."""
    size = c_size_t()
    _check(getattr(_library()[0], f"nvrtcGet{what}Size")(program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library()[0], f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _tells_apart(text: str, *targets: Target) -> bool:
    """Whether a source may be another one for some of them: it compares the architecture with a number and they
    answer differently, or does something else with it."""
    return any(
        question[1] is None
        or len({_COMPARED[question[1]](10 * t.number, int(question[2])) for t in targets}) > 1
        for question in _ASKS.finditer(text)
    )


def _is_exact(kernel: Kernel, target: Target) -> bool:
    """Whether a kernel's machine code for a target is that of ``sm_90a`` and the like, which no PTX gives."""
    return not target.is_ptx and target.capability in kernel.code.exact


class Nvrtc:
    """The CUDA C++ compiler."""

    def identity(self) -> str:
        return f"nvrtc {_candidates()[0].version or _library()[1]}"

    def cuda(self) -> CudaVersion:
        major, minor = self.identity().removeprefix("nvrtc ").split(".")[:2]
        return int(major), int(minor)

    def sources(self, kernel: Kernel) -> Mapping[str, str]:
        folder = ROOT / kernel.family
        texts: dict[str, str] = {}
        pending = [kernel.code.source, *kernel.code.headers]
        while pending:
            name = pending.pop()
            if name not in texts:
                texts[name] = (folder / name).read_text(encoding="utf-8")
                pending += _INCLUDE.findall(texts[name])
        return texts

    def options(self, kernel: Kernel, variant: Variant, target: Target) -> tuple[str, ...]:
        constants = kernel.code.constants(variant)
        return (
            f"--gpu-architecture={target}{'a' if _is_exact(kernel, target) else ''}",
            "--std=c++17",
            *(f"--define-macro={name}={value}" for name, value in constants.items()),
        )

    def compile(self, kernel: Kernel, variant: Variant, target: Target, shared: Shared) -> Compiled:
        if str(target) not in shared:
            shared |= self._assembled(kernel, target, shared) or self._images(
                kernel, variant, target
            )
        content, log = shared[str(target)]
        return Compiled(
            content=content,
            target=target,
            format="ptx" if target.is_ptx else "cubin",
            entry=kernel.code.entry,
            block=(32 * kernel.code.warps(variant), 1, 1),
            cluster=(1, 1, 1),
            dynamic_shared=kernel.code.shared(variant),
            hidden=0,
            log=log,
        )

    def _assembled(
        self, kernel: Kernel, target: Target, shared: Shared
    ) -> dict[str, tuple[bytes, str]]:
        """Machine code from the PTX of 8.0, where that is there already and would be the target's own;
        nothing otherwise. The bytes are those of ``_images``, as the assembler is of the same release.

        From 10.0 on NVRTC makes other PTX, and writes which build of the assembler it holds into the code.
        """
        from scan_registry.aot import ptxas  # a warm start of the JIT assembles nothing

        like = shared.get(str(_PORTABLE))
        if like is None or target.kind != "sm" or target.suffix or target.number not in _LIKE_80:
            return {}
        if _is_exact(kernel, target):
            return {}
        program = ptxas.find(self.identity().removeprefix("nvrtc "))
        texts = self.sources(kernel).values()
        if program is None or any(_tells_apart(text, _PORTABLE, target) for text in texts):
            return {}
        ptx, log = like
        return {str(target): (ptxas.assemble(program, ptxas.retargeted(ptx, target), target), log)}

    def _images(
        self, kernel: Kernel, variant: Variant, target: Target
    ) -> dict[str, tuple[bytes, str]]:
        """The image for a target, and where that is machine code, also the PTX that it was made from;
        each with the log."""
        texts = dict(self.sources(kernel))
        main = texts.pop(kernel.code.source)
        headers = (c_char_p * len(texts))(*(text.encode() for text in texts.values()))
        names = (c_char_p * len(texts))(*(name.encode() for name in texts))
        options = [option.encode() for option in self.options(kernel, variant, target)]
        (library, version), program = _library(), c_void_p()
        if self.identity() != f"nvrtc {version}":
            raise CompileError(f"{self.identity()} is installed, but what loads is {version}")
        _check(
            library.nvrtcCreateProgram(
                byref(program),
                main.encode(),
                kernel.code.source.encode(),
                len(texts),
                headers,
                names,
            )
        )
        try:
            status = library.nvrtcCompileProgram(
                program, len(options), (c_char_p * len(options))(*options)
            )
            log = _fetch(program, "ProgramLog").rstrip(b"\0").decode()
            _check(status, log)
            images = {}
            if not _is_exact(kernel, target):
                ptx = replace(target, kind="compute")
                images[str(ptx)] = _fetch(program, "PTX").rstrip(b"\0"), log
            if not target.is_ptx:
                images[str(target)] = _fetch(program, "CUBIN"), log
        finally:
            library.nvrtcDestroyProgram(byref(program))
        return images
