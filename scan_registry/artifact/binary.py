"""What an archive says of one binary, and how it is read from one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from scan_registry.base.frozen import dataclass
from scan_registry.hardware.target import CudaVersion, Target
from scan_registry.kernels.model import Variant


@dataclass(frozen=True)
class Binary:
    """A variant compiled for one target.

    format          "cubin" or "ptx"
    format_version  of its ELF ABI ("7") or PTX ISA ("8.8")
    oldest_driver   CUDA version that a driver has to support to load it
    entry           symbol of the entry point
    block           threads per block, along x, y and z
    cluster         blocks per cluster, likewise
    dynamic_shared  bytes of dynamic shared memory to ask for at launch
    hidden          null pointers to append to the parameters (Triton's scratch buffers)
    registers, static_shared, spill_bytes
                    per thread, per block and per thread; None for PTX, where the driver decides
    size, sha256    of the binary's bytes
    compiler        name and version
    options         what the compiler was given, in order
    source_sha256   digest of the sources, whatever their path
    """

    variant: Variant
    target: Target
    format: str
    format_version: str
    oldest_driver: CudaVersion
    entry: str
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    hidden: int
    registers: int | None
    static_shared: int | None
    spill_bytes: int | None
    size: int
    sha256: str
    compiler: str
    options: tuple[str, ...]
    source_sha256: str

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["variant"] = str(self.variant)
        record["target"] = str(self.target)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Binary:
        """The binary an entry describes; ``ValueError`` if it does not describe one."""
        if not isinstance(record, Mapping):
            raise ValueError(f"{record!r} is not an object")
        return cls(**{name: _READERS[name](name, record.get(name)) for name in _NAMES})

    def __str__(self) -> str:
        return f"{self.variant} for {self.target}"

    @property
    def threads(self) -> int:
        """Per block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def shared(self) -> int:
        """Bytes of shared memory per block, static and dynamic."""
        return self.dynamic_shared + (self.static_shared or 0)


def _count(value: object) -> bool:
    """A number of bytes, registers or the like that a file can mean."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not a string")
    return value


def read_target(value: Any) -> Target:
    """``ValueError`` if it names none."""
    return _target(str(value))


def read_count(name: str, value: Any) -> int:
    if not _count(value):
        raise ValueError(f"{name} is {value!r}, not a count")
    return int(value)


def _read_optional_count(name: str, value: Any) -> int | None:
    return None if value is None else read_count(name, value)


def _read_extent(name: str, value: Any) -> tuple[int, ...]:
    extent = isinstance(value, list) and len(value) == 3 and all(_count(n) and n for n in value)
    if not extent:
        raise ValueError(f"{name} is {value!r}, not three positive integers")
    return tuple(value)


def _read_version(name: str, value: Any) -> tuple[int, ...]:
    if not (isinstance(value, list) and len(value) == 2 and all(map(_count, value))):
        raise ValueError(f"{name} is {value!r}, not a version of two numbers")
    return tuple(value)


def _read_texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r}, not a list")
    return tuple(map(str, value))


#: How the fields of a binary are read from an entry; what is not named here is text.
_READERS: Mapping[str, Callable[[str, Any], Any]] = defaultdict(
    lambda: read_text,
    variant=lambda name, value: Variant.parse(str(value)),
    target=lambda name, value: read_target(value),
    oldest_driver=_read_version,
    block=_read_extent,
    cluster=_read_extent,
    dynamic_shared=read_count,
    hidden=read_count,
    registers=_read_optional_count,
    static_shared=_read_optional_count,
    spill_bytes=_read_optional_count,
    size=read_count,
    options=_read_texts,
)
_NAMES = tuple(field.name for field in fields(Binary))
_target: Callable[[str], Target] = lru_cache(Target.parse)
