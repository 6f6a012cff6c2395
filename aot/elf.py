"""What a cubin says of itself: the architecture and the resources of its kernels.

A cubin is an ELF file; the attributes are in its ``.nv.info`` section, as a byte of format, a byte
of attribute, and a 2-byte value or, for format 4, a 2-byte length and that many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER_SIZE = 64
_EM_CUDA = 190
_SIZED = 4
_FRAME_SIZE, _REGISTER_COUNT, _PARAMETER = 0x11, 0x2F, 0x17
#: Bytes of an instruction.
_INSTRUCTION = 16
#: The bits of an instruction's first 8 bytes that say which it is, and what they are of an asynchronous copy (LDGSTS,
#: of ``cp.async``), and of one whose shared address has a part that all lanes have in common.
OPCODES, COPY, COMMON_COPY = 0xFFF, 0xFAE, 0xDAE


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel: registers and stack per thread, shared memory per block (bytes).

    Kernels here keep no arrays in local memory, so any stack is spilled registers.
    """

    registers: int
    stack: int
    static_shared: int


def abi_version(cubin: bytes) -> int:
    """7 for the cubins of CUDA 12's compilers, 8 for those of CUDA 13's; ``ValueError`` if the bytes
    are no cubin."""
    header = len(cubin) >= _HEADER_SIZE and cubin[:4] == b"\x7fELF"
    if not header or struct.unpack_from("<H", cubin, 18)[0] != _EM_CUDA:
        raise ValueError("not a CUDA ELF file")
    return cubin[8]


def arch_number(cubin: bytes) -> int:
    """90 for a cubin of sm_90 or sm_90a; ``ValueError`` if the bytes are no cubin."""
    abi = abi_version(cubin)
    (flags,) = struct.unpack_from("<I", cubin, 48)
    return int(flags >> 8 & 0xFF if abi >= 8 else flags & 0xFF)


def _sections(cubin: bytes) -> dict[str, tuple[int, int, int]]:
    """Offset, size and header index of every section, by name."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)
    ]
    names = headers[names_index][4]

    def name(at: int) -> str:
        return cubin[names + at : cubin.index(b"\0", names + at)].decode()

    return {name(h[0]): (h[4], h[5], i) for i, h in enumerate(headers)}


def resources(cubin: bytes, entry: str) -> Resources:
    """Resources of the kernel with the symbol ``entry``; ``ValueError`` if the bytes hold none."""
    arch_number(cubin)
    try:
        return _resources(cubin, entry)
    except (KeyError, IndexError, struct.error) as error:
        raise ValueError(f"no intact kernel {entry!r} in the CUDA ELF file: {error}") from error


def illegal_copies(cubin: bytes, entry: str) -> int:
    """How many copies of the kernel end in an illegal instruction, which all did of this kind that were run, on an
    H100 and an H200: NVRTC 12.9 and nvcc 13.0 leave their descriptor where the hardware does not look for it.
    ``KeyError`` if the bytes hold no such kernel."""
    at, size, _ = _sections(cubin)[f".text.{entry}"]
    words = memoryview(cubin)[at : at + size // _INSTRUCTION * _INSTRUCTION].cast("Q")
    return sum(first & OPCODES == COMMON_COPY for first in words[::2])


def _resources(cubin: bytes, entry: str) -> Resources:
    sections = _sections(cubin)
    symbols, _, _ = sections[".symtab"]
    text_index = sections[f".text.{entry}"][2]
    attributes = {_FRAME_SIZE: 0, _REGISTER_COUNT: 0}
    for attribute, at in _sized(cubin, *sections[".nv.info"][:2]):
        if attribute in attributes:
            symbol, value = struct.unpack_from("<II", cubin, at)
            (section,) = struct.unpack_from("<H", cubin, symbols + symbol * 24 + 6)
            if section == text_index:
                attributes[attribute] = value
    shared = sections.get(f".nv.shared.{entry}", (0, 0, 0))[1]
    return Resources(attributes[_REGISTER_COUNT], attributes[_FRAME_SIZE], shared)


def parameters(cubin: bytes, entry: str) -> int:
    """How many parameters the kernel takes, or 0 if the file does not list them. ``KeyError`` if it has no such kernel."""
    at, size, _ = _sections(cubin)[f".nv.info.{entry}"]
    return sum(attribute == _PARAMETER for attribute, _ in _sized(cubin, at, size))


def _sized(cubin: bytes, at: int, size: int) -> Iterator[tuple[int, int]]:
    """The attributes of format 4 in a section, and where the bytes of each begin."""
    end = at + size
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == _SIZED:
            yield attribute, at
            at += length
