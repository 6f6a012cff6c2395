"""The binary of any variant for a GPU that is here: an installed one, or compiled by the JIT."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from scan_registry import jit
from scan_registry.archive import Archive, ArchiveError, Binary
from scan_registry.device import Device
from scan_registry.fit import Rung, jit_target, misfit, nearest_rung
from scan_registry.jit import CompileError
from scan_registry.kernels import family
from scan_registry.kernels.model import Variant

Obtained = tuple[Binary, bytes]


def obtain(device: Device, archives: Iterable[Archive], variant: Variant) -> Obtained:
    """The binary and its bytes; ``CompileError`` says why there are none that may be used.

    A variant that spills without the spec's leave is none: no wheel would hold it.
    """
    found = _installed(device, archives, variant) or _compiled(device, variant)
    binary, _ = found
    allowed = family(variant.family).kernel(variant.kernel, variant.language).may_spill
    if binary.spill_bytes and variant not in allowed:
        raise CompileError(f"it spills {binary.spill_bytes} bytes per thread")
    if reason := misfit(binary, device):
        raise CompileError(reason)
    return found


def _installed(device: Device, archives: Iterable[Archive], variant: Variant) -> Obtained | None:
    text = str(variant)
    for archive in archives:
        if archive.arch.misfit(device.capability) is not None:
            continue
        try:
            for entry in archive.of(variant.family, variant.kernel):
                exact = nearest_rung(entry.binary.target, device) == Rung.EXACT
                if entry.text == text and exact and misfit(entry.binary, device) is None:
                    return entry.binary, archive.read(entry.binary)
        except ArchiveError:
            continue  # what is compiled here stands in for it
    return None


def _compiled(device: Device, variant: Variant) -> Obtained:
    toolchain = jit.toolchains()[variant.language]
    if isinstance(toolchain, str):
        raise CompileError(toolchain)
    target = jit_target(toolchain, variant.language, device.capability)
    if isinstance(target, str):
        raise CompileError(target)
    compiled = jit.compile(variant, target)
    return compiled.binary, compiled.content


def obtain_all(
    device: Device,
    archives: Iterable[Archive],
    variants: Iterable[Variant],
    done: Callable[[], None] = lambda: None,
) -> Mapping[Variant, Obtained | str]:
    """The binaries of many variants, or the reason why there is none, compiled side by side: NVRTC runs
    in threads, and Triton in processes that threads wait for. ``done`` is called after each."""
    held, asked = tuple(archives), list(dict.fromkeys(variants))

    def one(variant: Variant) -> Obtained | str:
        try:
            return obtain(device, held, variant)
        except CompileError as error:
            return str(error)
        finally:
            done()

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        return dict(zip(asked, pool.map(one, asked), strict=True))
