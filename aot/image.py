"""What an image (a cubin, or PTX text) says of itself: the version of its format, and the oldest
driver that loads it.

A driver loads PTX up to the ISA of its own CUDA release, and cubins of any compiler of its major
release (CUDA Compatibility, "minor version compatibility"; PTX ISA, release notes). CUDA 12's
compilers write ELF ABI 7 for capabilities below 10.0 and ABI 8 from there on, CUDA 13's ABI 8 for all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scan_registry.aot import elf
from scan_registry.hardware.target import FIRST_CUDA, CudaVersion, Target

_PTX_VERSION = re.compile(rb"^\s*\.version\s+(\d+)\.(\d+)\s*$", re.MULTILINE)
#: PTX 8.5 came with CUDA 12.5, and so did every 8.x before it with its 12.x; then they part.
_PTX_CUDA: dict[tuple[int, int], CudaVersion] = {
    **{(8, minor): (12, minor) for minor in range(6)},
    (8, 6): (12, 7),
    (8, 7): (12, 8),
    (8, 8): (12, 9),
    (9, 0): (13, 0),
    (9, 1): (13, 1),
}


@dataclass(frozen=True)
class Form:
    """The version of an image's format, such as ELF ABI "7" or PTX ISA "8.8", and what it needs."""

    version: str
    oldest_driver: CudaVersion


def of_cubin(cubin: bytes, target: Target) -> Form:
    """``ValueError`` if the bytes are no cubin, or of an ABI that is not known."""
    abi = elf.abi_version(cubin)
    if abi not in (7, 8):
        raise ValueError(f"a cubin of ELF ABI {abi}; known are 7 and 8")
    major_release = (13, 0) if abi == 8 and target.capability < (10, 0) else (12, 0)
    return Form(str(abi), max(major_release, FIRST_CUDA.get(target.capability, (12, 0))))


def of_ptx(ptx: bytes) -> Form:
    """``ValueError`` if the text states no version, or one that is not known."""
    match = _PTX_VERSION.search(ptx)
    version = (int(match[1]), int(match[2])) if match else None
    if version not in _PTX_CUDA:
        raise ValueError(f"PTX of version {version}; known are 8.0 to {max(_PTX_CUDA)}")
    return Form("{}.{}".format(*version), _PTX_CUDA[version])


def parameters(image: bytes, entry: str, form: str) -> int:
    """How many parameters the kernel of a ``cubin`` or of ``ptx`` takes, or 0 if the image does not list them."""
    if form == "cubin":
        return elf.parameters(image, entry)
    listed = re.search(rb"\.entry\s+%s\s*\(([^)]*)\)" % re.escape(entry.encode()), image)
    return listed[1].count(b".param") if listed else 0
