"""Whether compiled code has the instruction that one assembler gets wrong.

Where the shared address of an asynchronous copy (LDGSTS, of ``cp.async``) with a cache hint has a part that all
lanes have in common, NVRTC 12.9 and nvcc 13.0 kept the hint in an odd uniform register,
``LDGSTS … [R2+UR0], desc[UR1][R4.64]``, which was an illegal instruction on an H200. Sources avoid it; only the
compiled code shows whether it was avoided.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from scan_registry.aot.elf import COMMON_COPY, COPY, OPCODES

_COPY = re.compile(r"^.*\bLDGSTS\b.*$", re.MULTILINE)
_HINT = re.compile(r"desc\[UR(\d+)\]")


def may_copy(cubin: bytes) -> bool:
    """Whether there may be asynchronous copies: some of its words look like one."""
    words = memoryview(cubin[: len(cubin) // 8 * 8]).cast("Q")
    return any(word & OPCODES in (COPY, COMMON_COPY) for word in words)


def cuobjdump(cubin: bytes, option: str) -> str:
    """What NVIDIA's tool says of machine code; ``FileNotFoundError`` where it is not installed."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        raise FileNotFoundError("triton, which brings cuobjdump, is not installed")
    tool = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        result = subprocess.run(
            [tool, option, path], capture_output=True, text=True, encoding="utf-8", check=True
        )
    return result.stdout


def copies(cubin: bytes) -> list[str]:
    """Its asynchronous copies, disassembled."""
    return [" ".join(line.split()) for line in _COPY.findall(cuobjdump(cubin, "--dump-sass"))]


def broken(copy: str) -> bool:
    """Whether its cache hint is in an odd register."""
    return any(int(register) % 2 for register in _HINT.findall(copy))
