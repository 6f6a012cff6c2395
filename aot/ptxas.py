"""NVIDIA's assembler: from the PTX of one architecture to another's machine code.

A compiler goes from a source to PTX and from there to machine code; the first part takes most of the time
and gives several architectures the same text, but for the line that names the target. A build then makes
it once.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from scan_registry.aot.toolchain import CompileError
from scan_registry.hardware.target import Target

_VERSION = re.compile(r"\bV(\d+(?:\.\d+)+)\s*$", re.MULTILINE)
_TARGET = re.compile(rb"^\.target sm_\d+", re.MULTILINE)


@cache
def find(version: str) -> Path | None:
    """The assembler of exactly this CUDA release, such as 12.9.86, out of those that Triton brings."""
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for program in sorted(Path(folder).glob("backends/nvidia/bin/ptxas*")):
            if _version(program) == version:
                return program
    return None


def _version(program: Path) -> str | None:
    try:
        said = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError:
        return None  # not a program of this platform
    match = _VERSION.search(said.stdout)
    return match[1] if match else None


def retargeted(ptx: bytes, target: Target) -> bytes:
    """The same PTX for another architecture; a suffix of the target, such as ``a``, stays."""
    return _TARGET.sub(b".target sm_%d" % target.number, ptx, count=1)


def assemble(program: Path, ptx: bytes, target: Target) -> bytes:
    """Machine code for ``target``, which the PTX names, too; ``CompileError`` holds the log."""
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "in.ptx"), Path(folder, "out.cubin")
        text.write_bytes(ptx)
        done = subprocess.run(
            [program, f"--gpu-name={target}", text, "--output-file", cubin],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise CompileError(
                f"{program.name} ended with {done.returncode}\n{done.stdout}".strip()
            )
        return cubin.read_bytes()
