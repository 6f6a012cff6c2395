"""Processes that are the ranks of gloo groups, started once for all tests of a run."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from scan_registry.kernels import operators

RANKS = 5
#: Seven send in as many rounds as five.
SIZES = (1, 2, 3, 4, RANKS, 7)
#: Of every run: another even number of ranks finds what these do.
USUAL_SIZES = (1, 2, 3, RANKS)
#: Of a collective, in seconds: longer than any takes that is not stuck.
GROUP_TIMEOUT = 60


class RankPool:
    """Processes, ``RANKS`` unless given, or as many as a task wants. It runs on the first so many of them, which have a group of
    their own.

    ``timeout`` is that of a collective, in seconds.
    """

    def __init__(self, folder: Path, ranks: int = RANKS, timeout: float = GROUP_TIMEOUT) -> None:
        self.folder, self.ranks, self.timeout, self._started = folder, ranks, timeout, 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        limit: float = 150,
        dies: int | None = None,
    ) -> list[Any]:
        """What ``function(rank, size, group, *args)`` returns on each of the first ``size`` ranks.

        ``dies`` is a rank that is to, whose result is None. ``AssertionError`` with the tracebacks of the ranks where it failed, or if one is not done within ``limit``
        seconds; all processes are then started anew by the next task.
        """
        if size > self.ranks:
            self.close()
            self.ranks = size
        if not self._processes:
            self.start()
        task = function.__module__, function.__qualname__, size, args
        for pipe in self._pipes[:size]:
            pipe.send(task)
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes[:size]):
            if not pipe.poll(limit):
                failures.append(f"rank {rank} was not done after {limit} s")
                self.close()
                break
            try:
                good, value = pipe.recv()
            except EOFError:
                if rank == dies:
                    results.append(None)
                    continue
                failures.append(f"rank {rank} has died")
                self.close()
                break
            (results if good else failures).append(value if good else f"rank {rank}:\n{value}")
        if failures:
            # What of the task is still under way on a rank would meet the next one.
            self.close()
        assert not failures, "\n".join(failures)
        return results

    def start(self) -> None:
        """Start the processes, as the first task does otherwise."""
        context = multiprocessing.get_context("forkserver")
        # What one rank or another imports sooner or later, once for all of them; the last is what a compilation needs.
        names = ["scan_registry.distributed.time_shards"]
        names += [f"scan_registry.kernels.{f}.op.distributed" for f in operators("distributed")]
        tensors = [
            f"torch.distributed.{name}" for name in ("fsdp", "tensor.parallel", "tensor.debug")
        ]
        dynamo = "torch._dynamo", "torch._dynamo.convert_frame", "torch._dynamo.backends.debugging"
        context.set_forkserver_preload([*tensors, *dynamo, "torch.testing", *names])
        # The server's own sys.path begins with the working folder, whose scan_registry may be the sources.
        here = os.getcwd()
        os.chdir(self.folder)
        try:
            ensure_running()
        finally:
            os.chdir(here)
        self._started += 1
        store = self.folder / f"store-{self._started}"
        for rank in range(self.ranks):
            mine, theirs = context.Pipe()
            arguments = rank, self.ranks, str(store), theirs, sys.path, self.timeout
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(
    rank: int, ranks: int, store: str, pipe: Connection, path: list[str], seconds: float
) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout
    )
    groups = {size: dist.new_group(range(size), timeout=timeout) for size in SIZES if size <= ranks}
    while True:
        try:
            module, name, size, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            function = getattr(import_module(module), name)
            answer = True, function(rank, size, groups[size], *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
