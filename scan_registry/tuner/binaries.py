"""The binary of any variant for a GPU that is here: an installed one, or compiled by the JIT."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache

from scan_registry.artifact.archive import Archive, ArchiveError, Binary
from scan_registry.dispatch.fit import Tier, jit_target, misfit, nearest_tier
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels import family
from scan_registry.kernels.model import Variant
from scan_registry.runtime import jit
from scan_registry.runtime.jit import CompileError

Obtained = tuple[Binary, bytes]


def obtain(device: Device, archives: Iterable[Archive], variant: Variant) -> Obtained:
    """The binary and its bytes; ``CompileError`` says why there is none that may be used. A variant that spills
    more registers than its spec allows is refused, as no wheel would hold it.
    """
    obtained = _installed(device, archives, variant)
    return _checked(device, variant, obtained or _compiled(variant, _target(device, variant)))


def _checked(device: Device, variant: Variant, obtained: Obtained) -> Obtained:
    """``CompileError`` if no wheel would hold it, or it does not fit the device."""
    binary, _ = obtained
    allowed = family(variant.family).kernel(variant.kernel, variant.language).code.may_spill
    if (binary.spill_bytes or 0) > allowed.get(variant, 0):
        raise CompileError(f"it spills {binary.spill_bytes} bytes per thread")
    if reason := misfit(binary, device):
        raise CompileError(reason)
    return obtained


def _installed(device: Device, archives: Iterable[Archive], variant: Variant) -> Obtained | None:
    text = str(variant)
    for archive in archives:
        if archive.arch.misfit(device.capability) is not None:
            continue
        try:
            for entry in archive.of(variant.family, variant.kernel):
                exact = nearest_tier(entry.binary.target, device) == Tier.EXACT
                if entry.text == text and exact and misfit(entry.binary, device) is None:
                    return entry.binary, archive.read(entry.binary)
        except ArchiveError:
            continue  # a binary that is compiled here takes its place
    return None


def _target(device: Device, variant: Variant) -> Target:
    """What the compiler here makes for the device; ``CompileError`` if it makes nothing."""
    toolchain = jit.toolchains()[variant.language]
    if isinstance(toolchain, str):
        raise CompileError(toolchain)
    target = jit_target(toolchain, variant.language, device.capability)
    if isinstance(target, str):
        raise CompileError(target)
    return target


def _compiled(variant: Variant, target: Target, *, alone: bool = False) -> Obtained:
    compiled = jit.compile(variant, target, alone=alone)
    return compiled.binary, compiled.content


# --- Many at once -----------------------------------------------------------------------------


def obtain_all(
    device: Device,
    archives: Iterable[Archive],
    variants: Iterable[Variant],
) -> Mapping[Variant, Obtained | str]:
    """The binaries of many variants, or the reason why there is none. What has to be compiled is
    compiled side by side, by processes of their own that stay for the next call; the JIT's cache keeps
    it."""
    sources, wanted = tuple(archives), list(dict.fromkeys(variants))
    obtained: dict[Variant, Obtained | str] = {}
    targets: dict[Variant, Target] = {}
    for variant in wanted:
        installed = _installed(device, sources, variant)
        try:
            if installed is None:
                targets[variant] = _target(device, variant)
            else:
                obtained[variant] = installed
        except CompileError as error:
            obtained[variant] = str(error)
    if targets:
        outcomes = _pool().map(_compiled_or_reason, targets.keys(), targets.values())
        obtained |= dict(zip(targets, outcomes, strict=True))
    return {variant: _or_reason(device, variant, obtained[variant]) for variant in wanted}


def _compiled_or_reason(variant: Variant, target: Target) -> Obtained | str:
    """In a process of its own."""
    try:
        return _compiled(variant, target, alone=True)
    except CompileError as error:
        return str(error)


def _or_reason(device: Device, variant: Variant, obtained: Obtained | str) -> Obtained | str:
    if isinstance(obtained, str):
        return obtained
    try:
        return _checked(device, variant, obtained)
    except CompileError as error:
        return str(error)


@cache
def _pool() -> ProcessPoolExecutor:
    """New interpreters, as a fork would copy what CUDA and threads hold here. An interruption is the
    parent's to handle."""
    workers = max(1, len(os.sched_getaffinity(0)))
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        workers, spawn, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    )
