"""CUDA kernels on the CPU: a kernel's source, compiled as C++ around an emulator of the GPU.

For tests on machines without one. It tells whether a kernel computes what it should, in any order that
CUDA allows; how fast a kernel is it does not tell.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from scan_registry.aot.nvrtc import Nvrtc
from scan_registry.kernels.model import Kernel, Static, Variant

EMULATOR = Path(__file__).with_name("emulator")
BLOCKS_AT_ONCE = 6
#: Bytes of a thread's stack, and of all of them, unless more threads run at once. A stack has a page and a cache line more than
#: a power of two: or the ends of all stacks, where threads work, would have the same few places in the processor's caches.
STACK, STACKS = (64 << 10) + 4096 + 64, 1 << 28
#: Of Linux's; Python does not name it.
MAP_NORESERVE = 0x4000
#: Where all tests of a run keep the libraries that they have in common, if there is such a folder.
shared: Path | None = None
#: SMs of the GPU that is emulated: few, so that small problems fill it.
SM_COUNT = 3
#: The architecture that is emulated unless a test asks for another: sm_90, in the form of ``__CUDA_ARCH__``.
ARCH = 900

_MAIN = """
#include "cuda.hpp"
#define __CUDA_ARCH__ {arch}
const unsigned emulator::blocks_of_cluster = {cluster};
const bool emulator::starts_in_order = {in_order};
#include "{source}"
extern "C" [[gnu::visibility("default")]]
void emulate(void** arguments, const unsigned* grid, unsigned threads, unsigned shared,
             unsigned blocks_at_once, unsigned seed, char* stacks, unsigned long bytes_of_stack) {{
    emulator::launch({entry}, arguments, grid, threads, shared, blocks_at_once, seed,
                     emulator::Stacks{{stacks, bytes_of_stack}});
}}
extern "C" [[gnu::visibility("default")]]
const unsigned emulated_parameters = emulator::parameters({entry});
"""
#: In place of the header that was compiled ahead.
_UNFIT = """
#ifndef EMULATED
#error The emulator's header depends on a macro of the kernel's.
#endif
"""


#: What runs the threads, compiled.
RUNNER = "emulator.o"


@cache
def stacks(size: int) -> ctypes.c_char:
    """Memory for the stacks of the threads that run at once. What a launch has touched of it, the next ones find there,
    where new pages would take longer than many a launch."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    # Threads take turns so often, each on a page of its own, that looking up small pages takes a third of the time.
    with suppress(OSError):  # where there are no large ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return ctypes.c_char.from_buffer(memory)


@cache
def compiler() -> str | None:
    """GCC's, whose options are used, if it is there."""
    return shutil.which("g++")


def emulate(
    library: Path,
    arguments: ctypes.Array[ctypes.c_void_p],
    grid: Sequence[int],
    *,
    threads: int = 1,
    shared: int = 0,
    at_once: int = 1,
    seed: int = 0,
) -> None:
    """Launch a library's kernel on pointers to its arguments; ``ValueError`` if it takes another number of them."""
    loaded = ctypes.CDLL(str(library))
    count = ctypes.c_uint.in_dll(loaded, "emulated_parameters").value
    if count != len(arguments):
        raise ValueError(
            f"the CUDA entry point has {count} parameters; the launch, which follows `parameters` of the spec, has {len(arguments)}"
        )
    loaded.emulate(
        arguments,
        (ctypes.c_uint * 3)(*grid),
        *map(ctypes.c_uint, (threads, shared, at_once, seed)),
        ctypes.byref(stacks(max(STACKS, at_once * threads * STACK))),
        ctypes.c_ulong(STACK),
    )


@dataclass(frozen=True)
class Emulated:
    """One variant, compiled for the CPU."""

    kernel: Kernel
    variant: Variant
    library: Path

    def run(
        self,
        problem: Any,
        tensors: Mapping[str, Tensor | None],
        seed: int,
        sm_count: int = SM_COUNT,
    ) -> None:
        """Launch it on tensors in the CPU's memory, by parameter; workspace is zeroed, like on a GPU, or else
        holds anything, and then what the launch has left there."""
        launch = self.kernel.launch(self.variant, problem, sm_count)
        scratch = (ctypes.c_uint64 * (launch.workspace // 8 + 2))()
        if not launch.zeroed:
            ctypes.memset(scratch, 0xA5, ctypes.sizeof(scratch))
        workspace = -(-ctypes.addressof(scratch) // 16) * 16 if launch.workspace else None
        values: list[Any] = []
        for parameter in self.kernel.parameters:
            if parameter.kind == "i64":
                values.append(ctypes.c_int64(launch.scalars[parameter.name]))
            elif parameter.name == "workspace":
                values.append(ctypes.c_void_p(workspace))
            else:
                tensor = tensors.get(parameter.name)
                values.append(ctypes.c_void_p(None if tensor is None else tensor.data_ptr()))
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        at_once = self._at_once(launch.grid, sm_count)
        for _ in range(1 if launch.zeroed else 2):
            emulate(
                self.library,
                pointers,
                launch.grid,
                threads=32 * self.kernel.code.warps(self.variant),
                shared=self.kernel.code.shared(self.variant),
                at_once=at_once,
                seed=seed,
            )
            if workspace and not launch.zeroed:
                line = ctypes.string_at(workspace, 16)
                as_it_was = line == b"\xa5" * 16
                assert as_it_was or line == bytes(16), f"the next launch would see {line.hex()}"
        if launch.pieces and (sums := tensors.get("gates_grad")) is not None and problem.sums:
            assert not sums[: launch.pieces].isnan().any(), "a sum was not written"
            assert sums[launch.pieces :].isnan().all(), "more sums than the launch says"

    def _at_once(self, grid: Sequence[int], sm_count: int) -> int:
        """A GPU that is to run a variant has room for those that share a column, and for one on each SM: those of a network
        wait for each other."""
        statics = dict(self.variant.statics)
        sharing = (
            math.prod(grid) if "single_wave" in statics else int(statics.get("ctas_per_column", 1))
        )
        return max(BLOCKS_AT_ONCE, sm_count, sharing)


def emulated(kernel: Kernel, variant: Variant, folder: Path, arch: int = ARCH) -> Emulated:
    """Compile a variant, in ``folder``, for an architecture."""
    texts, code = Nvrtc().sources(kernel), kernel.code
    library = library_of(code.source, code.entry, texts, code.constants(variant), folder, arch)
    return Emulated(kernel, variant, library)


def library_of(
    source: str,
    entry: str,
    texts: Mapping[str, str],
    constants: Mapping[str, Static],
    folder: Path,
    arch: int = ARCH,
) -> Path:
    """A library of the file ``source`` among ``texts``, in the shared folder or else ``folder``; compiled
    if it is not there yet. ``arch`` is what it finds in ``__CUDA_ARCH__``."""
    folder = shared or folder
    emulator = {path.name: path.read_text(encoding="utf-8") for path in sorted(EMULATOR.iterdir())}
    held = {name: emulator.get(Path(name).name, text) for name, text in texts.items()}
    cluster = max(1, int(constants.get("CLUSTER", 1)))
    # CTAs that wait for those with lower numbers, as a GPU starts them first.
    waits = any(constants.get(of) for of in ("CONSTANT_GATE", "RESIDENT", "SCALAR"))
    in_order = int(waits or source == "gates_sum.cu")
    main = _MAIN.format(source=source, entry=entry, cluster=cluster, in_order=in_order, arch=arch)
    everything = json.dumps([emulator, held, main, {**constants}], sort_keys=True)
    library = folder / f"{hashlib.sha256(everything.encode()).hexdigest()}.so"
    if library.exists():
        return library
    place = Path(tempfile.mkdtemp(dir=folder))
    sources = place / "family"  # which has its neighbour's headers: ../common/types.cuh
    for name, text in held.items():
        file = (sources / name).resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (sources / "main.cpp").write_text(main, encoding="utf-8")
    defined = [f"-D{name}={value}" for name, value in constants.items()]
    made = place / "kernel.so"
    ahead = ready(folder)
    _compile(["-shared", *defined, f"-I{ahead}", "-o", made, sources / "main.cpp", ahead / RUNNER])
    os.replace(made, library)
    return library


def _compile(words: Sequence[str | Path]) -> None:
    command = [
        # With -O1 kernels run as long, and take half as long again to compile.
        *(str(compiler()), "-std=c++17", "-Og", "-fPIC", "-pthread", "-w"),
        "-march=native",  # whose conversions of float16 and whose fused operations are instructions
        "-U_FORTIFY_SOURCE",  # which takes a jump from stack to stack for an error
        # Or several libraries would share what has to be each one's own.
        "-fno-gnu-unique",
        "-fvisibility=hidden",
        "-ffp-contract=off",
    ]
    if shutil.which("ld.gold"):  # which links in a third of the time
        command.append("-fuse-ld=gold")
    subprocess.run([*command, *map(str, words), f"-I{EMULATOR}"], check=True)


def ready(folder: Path | None = None) -> Path:
    """A folder with what all kernels have of the emulator, compiled ahead, which takes as long as a kernel does: its header,
    and what runs the threads. Where a kernel's macros do not fit the header, the compiler reads what stands there in its
    place, and fails."""
    folder = folder or shared
    assert folder is not None
    texts = [path.read_bytes() for path in sorted(EMULATOR.iterdir())]
    # Named by what it is compiled from, as the folder may outlive a run.
    found = folder / f"ready-{hashlib.sha256(b''.join(texts)).hexdigest()[:16]}"
    if not found.exists():
        fresh = Path(tempfile.mkdtemp(dir=folder))
        header = Path(shutil.copy(EMULATOR / "cuda.hpp", fresh))
        _compile(["-x", "c++-header", "-o", f"{header}.gch", header])
        _compile(["-c", "-o", fresh / RUNNER, EMULATOR / "emulator.cpp"])
        header.write_text(_UNFIT, encoding="utf-8")
        with suppress(OSError):  # somebody else was first
            fresh.rename(found)
    return found
