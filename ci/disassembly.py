"""Whether compiled code has the instruction that one assembler gets wrong.

Where the shared address of an asynchronous copy (LDGSTS, of ``cp.async``) with a cache hint has a part that all
lanes have in common, NVRTC 12.9 and nvcc 13.0 keep the hint in an odd uniform register,
``LDGSTS … [R2+UR0], desc[UR1][R4.64]``, which ends in an illegal instruction on every GPU. Sources avoid it; only
the compiled code shows whether it was avoided.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

#: In the first of its two words, on every architecture so far.
_OPCODE, _OPCODES = 0xFAE, 0xFFF
_COPY = re.compile(r"^.*\bLDGSTS\b.*$", re.MULTILINE)
_HINT = re.compile(r"desc\[UR(\d+)\]")


def may_copy(cubin: bytes) -> bool:
    """Whether there may be asynchronous copies: some of its words look like one."""
    words = memoryview(cubin[: len(cubin) // 8 * 8]).cast("Q")
    return any(word & _OPCODES == _OPCODE for word in words)


def disassembled(cubin: bytes) -> str:
    """What cuobjdump says of machine code; ``RuntimeError`` where it says nothing."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        raise RuntimeError("triton, which brings cuobjdump, is not installed")
    tool = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "-sass", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"cuobjdump: {(result.stdout + result.stderr).strip()}")
    return result.stdout


def copies(code: str) -> list[str]:
    """The asynchronous copies in disassembled code."""
    return [" ".join(line.split()) for line in _COPY.findall(code)]


def broken(copy: str) -> bool:
    """Whether its cache hint is in an odd register."""
    return any(int(register) % 2 for register in _HINT.findall(copy))
