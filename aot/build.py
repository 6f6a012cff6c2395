"""Build every archive of a wheel: plan, compile in parallel, pack."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scan_registry import archive
from scan_registry.aot.compile import compile_variant, refuse_spill
from scan_registry.aot.pack import pack
from scan_registry.aot.plan import Job, plan
from scan_registry.aot.toolchain import CompileError, MissingCompilerError
from scan_registry.archive import Archive, ArchiveError, Binary
from scan_registry.cache import Cache
from scan_registry.target import Target

Outcome = tuple[Binary, bytes] | str


def _compile(job: Job, cache_folder: Path | None) -> Outcome:
    """The binary, or why an optional one is left out."""
    cache = Cache(cache_folder, "SCAN_REGISTRY_BUILD_CACHE") if cache_folder else None
    try:
        binary, content = compile_variant(job.variant, job.arch, cache)
        refuse_spill(binary)
    except MissingCompilerError:
        raise
    except CompileError as error:
        if job.optional:
            return str(error)
        raise
    return binary, content


def build_archives(
    folder: Path, archs: Sequence[Target], cache_folder: Path, origin: Mapping[str, Any]
) -> list[Path]:
    """Fill ``folder`` with one archive per architecture, and with no other archive.

    The first variant that fails ends the build with its compiler's log; archives that were there
    before are then left as they were.
    """
    jobs = plan(archs)
    everything = [job for per_arch in jobs.values() for job in per_arch]
    results = dict(zip(everything, compile_all(everything, cache_folder), strict=True))
    paths = [
        pack(folder, arch, _held(results[job] for job in per_arch), origin)
        for arch, per_arch in jobs.items()
    ]
    for stale in set(folder.glob(f"*{archive.SUFFIX}")) - set(paths):
        stale.unlink()
    return paths


def _held(outcomes: Iterable[Outcome]) -> list[tuple[Binary, bytes]]:
    return [outcome for outcome in outcomes if not isinstance(outcome, str)]


def compile_all(jobs: Sequence[Job], cache_folder: Path | None) -> Sequence[Outcome]:
    """Compile with one process per core; report on stderr. Without a folder, compile everything."""
    workers = int(os.environ.get("SCAN_REGISTRY_JOBS") or len(os.sched_getaffinity(0)))
    started = time.monotonic()
    results: list[Outcome] = []
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[job]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    # Forked workers inherit how this process finds the packages, whatever that is.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(max(1, workers), mp_context=context)
    try:
        with progress:
            bar = progress.add_task("compile", total=len(jobs), job="")
            outcomes = pool.map(_compile, jobs, [cache_folder] * len(jobs))
            for job, outcome in zip(jobs, outcomes, strict=True):
                results.append(outcome)
                progress.update(bar, advance=1, job=f"{job.arch}")
                if len(results) == len(jobs) or jobs[len(results)].arch != job.arch:
                    _report(job.arch, results, jobs, started)
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _report(arch: Target, results: Sequence[Outcome], jobs: Sequence[Job], started: float) -> None:
    outcomes = [each for each, job in zip(results, jobs, strict=False) if job.arch == arch]
    made = [binary for binary, _ in _held(outcomes)]
    for reason in (each for each in outcomes if isinstance(each, str)):
        print(f"scan-registry: {arch.label}: left out: {reason}", file=sys.stderr)
    size = sum(binary.size for binary in made)
    print(
        f"scan-registry: {arch.label}: {len(made)} binaries, {size / 1e6:.2f} MB, "
        f"{time.monotonic() - started:.1f} s",
        file=sys.stderr,
        flush=True,
    )


def check_archives(paths: Iterable[Path]) -> None:
    """Read back everything that was packed; ``ArchiveError`` if anything is not intact."""
    for path in paths:
        packed = Archive(path)
        if not packed.binaries:
            raise ArchiveError(f"{path}: holds no binary")
        for binary in packed.binaries:
            packed.read(binary)
