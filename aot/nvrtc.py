"""CUDA C++ through NVRTC, called by ctypes: no GPU, no driver, no CUDA headers, no host compiler.

Plain ctypes rather than cuda-bindings, because the same code then drives the pinned NVRTC of a
wheel build and whichever NVRTC (12 or 13) torch has brought on a user's machine.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from scan_registry.aot.toolchain import Compiled, CompileError, MissingCompilerError
from scan_registry.kernels import ROOT
from scan_registry.kernels.model import Kernel, Variant
from scan_registry.target import Target

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def _candidates() -> list[Path]:
    """NVRTC libraries in the ``nvidia`` packages of this environment, oldest major version first."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    found = [
        library
        for folder in map(Path, folders or ())
        for library in folder.glob("*/lib/libnvrtc.so.*")
    ]
    return sorted(found, key=lambda library: library.name)


@cache
def _library() -> ctypes.CDLL:
    for name in [*map(str, _candidates()), "libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingCompilerError(
        "NVRTC is not installed; `pip install nvidia-cuda-nvrtc-cu12` gives it"
    )


def _check(status: int, log: str = "") -> None:
    if status:
        library = _library()
        library.nvrtcGetErrorString.restype = c_char_p
        raise CompileError(f"{library.nvrtcGetErrorString(status).decode()}\n{log}".strip())


def _fetch(program: c_void_p, what: str) -> bytes:
    """One of the byte strings that NVRTC hands out as a size and a copy."""
    size = c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


class Nvrtc:
    """The CUDA C++ compiler."""

    def identity(self) -> str:
        major, minor = c_int(), c_int()
        _check(_library().nvrtcVersion(byref(major), byref(minor)))
        version = f"{major.value}.{minor.value}"
        for package in (f"nvidia-cuda-nvrtc-cu{major.value}", "nvidia-cuda-nvrtc"):
            try:
                installed = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            if installed.startswith(f"{version}."):
                return f"nvrtc {installed}"
        return f"nvrtc {version}"

    def sources(self, kernel: Kernel) -> Mapping[str, str]:
        folder = ROOT / kernel.family
        texts: dict[str, str] = {}
        pending = [kernel.source]
        while pending:
            name = pending.pop()
            if name not in texts:
                texts[name] = (folder / name).read_text()
                pending += _INCLUDE.findall(texts[name])
        return texts

    def options(self, kernel: Kernel, variant: Variant, target: Target) -> tuple[str, ...]:
        constants = kernel.constants(variant)
        return (
            f"--gpu-architecture={target}",
            "--std=c++17",
            *(f"--define-macro={name}={value}" for name, value in constants.items()),
        )

    def compile(self, kernel: Kernel, variant: Variant, target: Target) -> Compiled:
        texts = dict(self.sources(kernel))
        main = texts.pop(kernel.source)
        headers = (c_char_p * len(texts))(*(text.encode() for text in texts.values()))
        names = (c_char_p * len(texts))(*(name.encode() for name in texts))
        options = [option.encode() for option in self.options(kernel, variant, target)]
        library, program = _library(), c_void_p()
        _check(
            library.nvrtcCreateProgram(
                byref(program),
                main.encode(),
                kernel.source.encode(),
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
            if target.is_ptx:
                content, form = _fetch(program, "PTX").rstrip(b"\0"), "ptx"
            else:
                content, form = _fetch(program, "CUBIN"), "cubin"
        finally:
            library.nvrtcDestroyProgram(byref(program))
        return Compiled(
            content=content,
            target=target,
            format=form,
            entry=kernel.entry,
            block=(32 * kernel.warps(variant), 1, 1),
            cluster=(1, 1, 1),
            dynamic_shared=0,
            hidden=0,
            log=log,
        )
