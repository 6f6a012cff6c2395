"""Processes that start together, log what they compile, and may be killed; for ``stress_cache.py``."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scan_registry.aot import compile as compiling

TIME_LIMIT = 300.0  # seconds until all have to be done


@dataclass
class Worker:
    """One process of a round: what it said, and when it was killed."""

    pid: int
    status: int | None = None
    killed: int | None = None
    said: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Flight:
    """One compile, from begin to end, in nanoseconds; ``end`` is None if it never came."""

    pid: int
    key: str
    begin: int
    end: int | None


class Gang:
    """Processes that are forked, start together, and log what they do to a folder of their own."""

    def __init__(self, folder: Path, count: int, work: Callable[[], dict[str, Any]]) -> None:
        self._log, self._said = folder / "log", folder / "said"
        gate, opened = os.pipe()
        self.workers = [Worker(self._fork(gate, opened, work)) for _ in range(count)]
        os.close(gate)
        os.close(opened)  # and off they go

    def _fork(self, gate: int, opened: int, work: Callable[[], dict[str, Any]]) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.close(opened)
            os.read(gate, 1)
            self._watch_compiles()
            said, status = work(), 0
        except BaseException:
            said = {"failure": traceback.format_exc()}
        _append(self._said, json.dumps({"pid": os.getpid(), **said}))
        os._exit(status)

    def _watch_compiles(self) -> None:
        """Log the begin and the end of each compile in this process."""
        real = compiling._compile

        def logged(made_of: Any, *rest: Any) -> Any:
            self._mark("begin", made_of.key)
            made = real(made_of, *rest)
            self._mark("end", made_of.key)
            return made

        compiling._compile = logged

    def _mark(self, what: str, key: str) -> None:
        _append(self._log, f"{what} {os.getpid()} {key} {time.monotonic_ns()}")

    def flights(self) -> list[Flight]:
        """The compiles so far."""
        begun: dict[tuple[int, str], int] = {}
        flights = []
        for what, pid, key, moment in map(str.split, _lines(self._log)):
            if what == "begin":
                begun[int(pid), key] = int(moment)
            else:
                flights.append(Flight(int(pid), key, begun.pop((int(pid), key)), int(moment)))
        return flights + [Flight(pid, key, begin, None) for (pid, key), begin in begun.items()]

    def finish(self, kills: int, chance: random.Random) -> None:
        """Wait for all, killing some at random: every other time, one that is compiling."""
        deadline = time.monotonic() + TIME_LIMIT
        while running := [worker for worker in self.workers if worker.status is None]:
            time.sleep(chance.uniform(0.001, 0.05) if kills else 0.01)
            for worker in running:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    worker.status = os.waitstatus_to_exitcode(status)
            alive = [worker for worker in running if worker.status is None]
            if time.monotonic() > deadline:
                for worker in alive:
                    os.kill(worker.pid, signal.SIGKILL)
            elif alive and kills:
                busy = {flight.pid for flight in self.flights() if flight.end is None}
                compiling_now = [worker for worker in alive if worker.pid in busy]
                victims = compiling_now if kills % 2 else alive
                if victims and all(worker.killed is None for worker in victims):
                    kills -= 1
                    victim = chance.choice(victims)
                    victim.killed = time.monotonic_ns()
                    os.kill(victim.pid, signal.SIGKILL)
        said = {record["pid"]: record for record in map(json.loads, _lines(self._said))}
        for worker in self.workers:
            worker.said = said.get(worker.pid, {})


def _append(path: Path, line: str) -> None:
    """Append a line in one write, so that lines of several processes do not mix."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
