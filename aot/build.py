"""Build every archive of a wheel: plan, compile in parallel, pack."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scan_registry.aot.compile import compile_variant, refuse_parameters, refuse_spill
from scan_registry.aot.pack import pack
from scan_registry.aot.plan import Job, plan
from scan_registry.aot.toolchain import CompileError, MissingCompilerError, Shared
from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive, ArchiveError, Binary
from scan_registry.cache.store import Cache
from scan_registry.hardware.target import SHARED_MEMORY, Target
from scan_registry.kernels.model import Variant

Entry = tuple[Binary, bytes]
#: A binary, or why an optional one is left out.
Outcome = Entry | str


def _compile(jobs: Sequence[Job], cache_folder: Path | None) -> dict[Job, Outcome]:
    """One variant for all of its architectures, which have part of the work in common."""
    cache = Cache(cache_folder, "SCAN_REGISTRY_BUILD_CACHE") if cache_folder else None
    outcomes, shared = dict[Job, Outcome](), Shared()
    # The PTX of an old architecture gives machine code of later ones, and its own machine code gives the PTX.
    for job in sorted(jobs, key=lambda job: (job.arch.capability, job.arch.is_ptx, job.arch)):
        try:
            binary, content = compile_variant(job.variant, job.arch, cache, shared)
            refuse_parameters(binary, content)
            refuse_spill(binary)
            if job.optional:
                _refuse_misfit(binary)
        except MissingCompilerError:
            raise
        except CompileError as error:
            if not job.optional:
                raise
            outcomes[job] = str(error)
        else:
            outcomes[job] = binary, content
    return outcomes


def _refuse_misfit(binary: Binary) -> None:
    """``CompileError`` for machine code that no GPU of its architecture has room for."""
    most = SHARED_MEMORY.get(binary.target.capability)
    if most is not None and binary.shared > most and not binary.target.is_ptx:
        raise CompileError(
            f"{binary} takes {binary.shared} bytes of shared memory per block; {binary.target} has {most}"
        )


def build_archives(
    folder: Path, archs: Sequence[Target], cache_folder: Path, origin: Mapping[str, Any]
) -> list[Path]:
    """Fill ``folder`` with one archive per architecture, and with no other archive.

    The first variant that fails ends the build with its compiler's log; archives that were there
    before are then left as they were.
    """
    jobs = plan(archs)
    outcomes = compile_all([job for per_arch in jobs.values() for job in per_arch], cache_folder)
    paths = [
        pack(folder, arch, _binaries(outcomes[job] for job in per_arch), origin)
        for arch, per_arch in jobs.items()
    ]
    for stale in set(folder.glob(f"*{archive.SUFFIX}")) - set(paths):
        stale.unlink()
    return paths


def _workers() -> int:
    """How many things to do at a time."""
    return max(1, int(os.environ.get("SCAN_REGISTRY_JOBS") or len(os.sched_getaffinity(0))))


def _binaries(outcomes: Iterable[Outcome]) -> list[Entry]:
    return [outcome for outcome in outcomes if not isinstance(outcome, str)]


def compile_all(jobs: Iterable[Job], cache_folder: Path | None) -> Mapping[Job, Outcome]:
    """Compile with one process per core; report on stderr. Without a folder, compile everything."""
    by_variant: dict[Variant, list[Job]] = {}
    for job in jobs:
        by_variant.setdefault(job.variant, []).append(job)
    compiled: dict[Job, Outcome] = {}
    # Forked workers inherit how this process finds the packages, whatever that is.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(_workers(), mp_context=context)
    try:
        finished = pool.map(_compile, by_variant.values(), [cache_folder] * len(by_variant))
        for outcome in _reported(finished, len(by_variant)):
            compiled |= outcome
    finally:
        pool.shutdown(cancel_futures=True)
    for arch in dict.fromkeys(job.arch for job in compiled):
        outcomes = [outcome for job, outcome in compiled.items() if job.arch == arch]
        for reason in (outcome for outcome in outcomes if isinstance(outcome, str)):
            _say(f"{arch.label}: left out: {reason}")
        entries = _binaries(outcomes)
        size = sum(binary.size for binary, _ in entries)
        _say(f"{arch.label}: {len(entries)} binaries, {size / 1e6:.2f} MB")
    return compiled


def _reported(
    outcomes: Iterable[dict[Job, Outcome]], variants: int
) -> Iterator[dict[Job, Outcome]]:
    """The outcomes, with a bar on terminals and four lines elsewhere."""
    started = time.monotonic()
    console = Console(stderr=True)
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("compile", total=variants)
        for number, outcome in enumerate(outcomes, 1):
            progress.advance(bar)
            if not console.is_terminal and number * 4 // variants > (number - 1) * 4 // variants:
                _say(f"{number} of {variants} variants, {time.monotonic() - started:.0f} s")
            yield outcome


def _say(text: str) -> None:
    print(f"scan-registry: {text}", file=sys.stderr, flush=True)


def check_archives(paths: Iterable[Path]) -> None:
    """Read back everything that was packed; ``ArchiveError`` if anything is not intact."""
    for path in paths:
        packed = Archive(path)
        if not packed.binaries:
            raise ArchiveError(f"{path}: holds no binary")
        read = packed.reader()
        for binary in packed.binaries:
            read(binary)
