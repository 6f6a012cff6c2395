"""Builds the stub CUDA driver (cuda.c), describes to it what to play, and reads what it saw.

It is loaded by its path, by the fixture ``stub_driver``; its classes are in reach of tests through
the :class:`Stub` that the fixture gives.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import captured

SOURCE = Path(__file__).with_name("cuda.c")
_FLAGS = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
_ELF_HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_ARCH = re.compile(r"sm_(\d+)(a?)")


def compiler() -> list[str]:
    """The C compiler's command: ``$CC`` or ``cc``."""
    return shlex.split(os.environ.get("CC") or "cc")


def build(folder: Path, source: str | Path = SOURCE, name: str = "libcuda_stub.so") -> Path:
    """A shared library from C, a file or a text, in ``folder``."""
    if isinstance(source, str):
        text = source
        source = folder / f"{name}.c"
        source.write_text(text, encoding="utf-8")
    library = folder / name
    command = [*compiler(), *_FLAGS, str(source), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if built.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed\n{built.stderr}")
    return library


@dataclass(frozen=True)
class Gpu:
    """A device to play. Shared memory in bytes, what a block can opt in to."""

    capability: tuple[int, int]
    sms: int
    shared: int
    registers: int
    threads: int
    name: str

    def __str__(self) -> str:
        major, minor = self.capability
        return (
            f"device capability={major}.{minor} sms={self.sms} shared={self.shared} "
            f"registers={self.registers} threads={self.threads} name={self.name}"
        )


@dataclass(frozen=True)
class Failure:
    """A failure to play: of ``call``, after ``after`` calls that pass, ``times`` times or for ever.

    Only calls on device ``device``, if given, and about ``match`` count: text in the image of
    cuModuleLoadData, or the entry of a function.
    """

    call: str
    status: int
    after: int = 0
    times: int = 0
    device: int | None = None
    match: str = ""

    def __str__(self) -> str:
        device = -1 if self.device is None else self.device
        match = f" match={self.match}" if self.match else ""
        return (
            f"fail {self.call} status={self.status} after={self.after} times={self.times} "
            f"device={device}{match}"
        )


@dataclass(frozen=True)
class Call:
    """A call that the stub saw, under the name without ``_v2``.

    ``details`` holds what else the log says of it: image, bytes, entry, grid, block, shared, stream,
    pointer, value, attribute, mode. ``device`` is None where the call is on none.
    """

    name: str
    process: int
    thread: int
    device: int | None
    status: int
    details: Mapping[str, str]

    @classmethod
    def parse(cls, line: str) -> Call:
        name, *pairs = line.split()
        values = dict(pair.split("=", 1) for pair in pairs)
        process, thread, device, status = (
            int(values.pop(key)) for key in ("process", "thread", "device", "status")
        )
        return cls(name, process, thread, None if device < 0 else device, status, values)

    @property
    def entry(self) -> str:
        return self.details["entry"]

    @property
    def image(self) -> str:
        """The target of a loaded image, such as ``sm_90a`` or ``compute_80``."""
        return self.details["image"]

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(map(int, self.details["grid"].split(",")))

    @property
    def block(self) -> tuple[int, ...]:
        return tuple(map(int, self.details["block"].split(",")))

    def number(self, detail: str) -> int:
        return int(self.details[detail])


@dataclass
class Stub:
    """One stub driver: the built library, what it plays, and its files in ``folder``.

    It plays no GPU until :meth:`gpu` has added one. The library reads its configuration once per
    process, so each process plays what was described before it started.
    """

    library: Path
    folder: Path
    version: tuple[int, int] = (13, 0)
    gpus: list[Gpu] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def gpu(
        self,
        capability: tuple[int, int] = (9, 0),
        *,
        sms: int = 132,
        shared: int = 232_448,
        registers: int = 65_536,
        threads: int = 1024,
        name: str = "Imaginary GPU",
    ) -> Stub:
        """Add a GPU: the first has ordinal 0."""
        self.gpus.append(Gpu(capability, sms, shared, registers, threads, name))
        return self

    def fail(self, call: str, status: int, **conditions: Any) -> Stub:
        """Add a failure; ``conditions`` are fields of :class:`Failure`."""
        self.failures.append(Failure(call, status, **conditions))
        return self

    def environment(self) -> dict[str, str]:
        """Write the configuration; the variables that make a process use it."""
        major, minor = self.version
        lines = [f"driver {major}.{minor}", *map(str, self.gpus), *map(str, self.failures)]
        self._configuration.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return {
            "SCAN_REGISTRY_LIBCUDA": str(self.library),
            "STUB_CUDA_CONFIG": str(self._configuration),
            "STUB_CUDA_LOG": str(self._log),
        }

    def run(
        self,
        script: str,
        *arguments: object,
        check: bool = True,
        start: Callable[..., subprocess.CompletedProcess[str]] = captured,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python script against the stub, in a fresh process away from the sources.

        With ``check``, ``AssertionError`` with what the script printed if it fails. ``start`` is ``forked.captured`` for one
        that imports torch.
        """
        environment = {**os.environ, **self.environment(), **variables}
        words = [sys.executable, "-c", script, *arguments]
        done = start(words, cwd=self.folder, env=environment)
        if check and done.returncode:
            raise AssertionError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def calls(self, *names: str) -> list[Call]:
        """The calls so far, of every process, in order; only those with these names if any."""
        if not self._log.exists():
            return []
        calls = map(Call.parse, self._log.read_text(encoding="utf-8").splitlines())
        return [call for call in calls if not names or call.name in names]

    @property
    def _configuration(self) -> Path:
        return self.folder / "stub.conf"

    @property
    def _log(self) -> Path:
        return self.folder / "stub.log"

    @staticmethod
    def cubin(arch: str = "sm_90", entries: Iterable[str] = ("kernel",), abi: int = 7) -> bytes:
        """As much of a cubin as the stub looks at: an ELF header, and the names of the kernels."""
        match = _ARCH.fullmatch(arch)
        if match is None:
            raise ValueError(f"{arch!r} is no architecture of machine code")
        number, specific = int(match[1]), bool(match[2])
        flags = number << 8 | specific << 3 if abi >= 8 else number | specific << 11
        names = b"".join(name.encode() + b"\0" for name in entries)
        end = _ELF_HEADER.size + len(names)
        identity = (b"\x7fELF", 2, 1, 1, 65 if abi >= 8 else 51, abi)
        # An empty section table at the end says how long the file is, as the real one does.
        header = _ELF_HEADER.pack(*identity, 2, 190, 1, 0, 0, end, flags, 64, 56, 0, 64, 0, 0)
        return header + names

    @staticmethod
    def ptx(
        target: str = "sm_80", entries: Iterable[str] = ("kernel",), version: str = "8.0"
    ) -> bytes:
        """As much of a PTX text as the stub looks at."""
        bodies = "".join(f".visible .entry {name}() {{ ret; }}\n" for name in entries)
        head = f"//\n.version {version}\n.target {target}\n.address_size 64\n"
        return (head + bodies).encode()
