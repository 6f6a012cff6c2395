"""Try to break the cache of compiled kernels: many processes, kills, bad bits, disks that refuse.

    python tests/stress/cache.py --processes 64 --rounds 20 --kills 0.2
    python tests/stress/cache.py --scenario full

Needs NVRTC and no GPU. Scenarios, all of them unless one is named:

    race       processes that are forked together compile one kernel into one empty folder, while
               some of them, and above all the one that is compiling, are killed
    flipped    the same with a folder whose entry has a flipped bit, and no kills
    read-only  at most 8 processes, a folder that they cannot write to: empty, then with the kernel in it
    full       at most 8 processes, which cannot write a whole entry: files are limited to 4 KiB

A violation is a process that fails or gets other bytes than the rest, an entry that is not intact, a compile beside another of
the same kernel where there are locks, a compile too many, or something that clearing the cache leaves behind. Any makes the exit
status 1.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scan_registry.aot import compile as compiling
from scan_registry.artifact.archive import SUFFIX, ArchiveError, digest
from scan_registry.cache.store import Cache, CacheWarning
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.runtime import jit

TARGET = Target.parse("sm90")
VARIANTS = FAMILY.kernel("time_last_forward", "cuda").variants
FEW = 8  # processes where each has to compile
TIME_LIMIT = 300.0  # seconds until all processes have to be done
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3


# --- Processes --------------------------------------------------------------------------------


@dataclass
class Worker:
    """One process of a round: its exit status, when it was killed, and its report."""

    pid: int
    status: int | None = None
    killed: int | None = None
    report: dict[str, Any] = field(default_factory=dict)


class Compile(NamedTuple):
    """One compile, from begin to end, in nanoseconds; ``end`` is None if it never came."""

    pid: int
    key: str
    begin: int
    end: int | None


class Workers:
    """Processes that are forked, start together, and log their compiles in a folder."""

    def __init__(self, folder: Path, count: int, work: Callable[[], dict[str, Any]]) -> None:
        self.log, self.reports = folder / "log", folder / "reports"
        gate, opened = os.pipe()
        self.all = [Worker(self._fork(gate, opened, work)) for _ in range(count)]
        os.close(gate)
        os.close(opened)  # lets them start

    def _fork(self, gate: int, opened: int, work: Callable[[], dict[str, Any]]) -> int:
        if pid := os.fork():
            return pid
        status = 1
        try:
            os.close(opened)
            os.read(gate, 1)
            self._watch_compiles()
            report, status = work(), 0
        except BaseException:
            report = {"failure": traceback.format_exc()}
        _append(self.reports, json.dumps({"pid": os.getpid(), **report}))
        os._exit(status)

    def _watch_compiles(self) -> None:
        """Log the begin and the end of each compile in this process."""
        real = compiling._compile

        def logged(source: Any, *rest: Any) -> Any:
            _append(self.log, f"begin {os.getpid()} {source.key} {time.monotonic_ns()}")
            result = real(source, *rest)
            _append(self.log, f"end {os.getpid()} {source.key} {time.monotonic_ns()}")
            return result

        compiling._compile = logged

    def compiles(self) -> list[Compile]:
        begun: dict[tuple[int, str], int] = {}
        ended = []
        for what, pid, key, moment in map(str.split, _lines(self.log)):
            if what == "begin":
                begun[int(pid), key] = int(moment)
            else:
                ended.append(Compile(int(pid), key, begun.pop((int(pid), key)), int(moment)))
        return ended + [Compile(pid, key, begin, None) for (pid, key), begin in begun.items()]

    def most_at_once(self) -> int:
        """Compiles of one kernel at one time. A killed process ended its compile when it was killed."""
        killed = {worker.pid: worker.killed for worker in self.all}
        changes = []
        for pid, key, begin, end in self.compiles():
            changes += [(begin, 1, key), (end or killed.get(pid) or time.monotonic_ns(), -1, key)]
        now: dict[str, int] = {}
        most = 0
        for _, change, key in sorted(changes):
            now[key] = now.get(key, 0) + change
            most = max(most, now[key])
        return most

    def finish(self, kills: int, chance: random.Random) -> None:
        """Wait for all, killing some at random: every other time, one that is compiling."""
        deadline = time.monotonic() + TIME_LIMIT
        while running := [worker for worker in self.all if worker.status is None]:
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
                kills -= self._kill_one(alive, chance, only_compiling=kills % 2 == 1)
        reports = {record["pid"]: record for record in map(json.loads, _lines(self.reports))}
        for worker in self.all:
            worker.report = reports.get(worker.pid, {})

    def _kill_one(self, alive: list[Worker], chance: random.Random, only_compiling: bool) -> bool:
        """Whether one was killed: not where none compiles, or while one that was killed is still there."""
        busy = {job.pid for job in self.compiles() if job.end is None}
        victims = [w for w in alive if w.pid in busy] if only_compiling else alive
        if not victims or any(worker.killed is not None for worker in victims):
            return False
        victim = chance.choice(victims)
        victim.killed = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        return True


def _append(path: Path, line: str) -> None:
    """Append a line in one write, so that lines of several processes do not mix."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def compile_here(number: int, times: int = 1) -> dict[str, Any]:
    """What a worker does: get the variant for this round out of the cache, or compile it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [jit.compile(VARIANTS[number % len(VARIANTS)], TARGET) for _ in range(times)]
    if any(digest(result.content) != result.binary.sha256 for result in results):
        raise AssertionError("the bytes do not have the digest that is stated")
    return {
        "sha256": sorted({result.binary.sha256 for result in results}),
        "cached": [result.cached for result in results],
        "warnings": [str(w.message) for w in caught if issubclass(w.category, CacheWarning)],
    }


# --- Checks -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of a scenario."""

    scenario: str
    processes: int
    rounds: int = 0
    kills: int = 0
    compiles: int = 0
    failures: list[str] = field(default_factory=list)

    def demand(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(f"{self.scenario}: round {self.rounds}: {what}")

    def check_workers(self, workers: Workers) -> None:
        """Every process that was not killed has succeeded, and all have the same bytes."""
        got = set()
        for worker in workers.all:
            if worker.status == -signal.SIGKILL and worker.killed is not None:
                self.kills += 1
                continue
            what = worker.report.get("failure") or f"a process ended with {worker.status}"
            self.demand(worker.status == 0, what)
            got.update(worker.report.get("sha256", ()))
        self.demand(len(got) <= 1, f"processes have different binaries: {sorted(got)}")
        self.compiles += len(workers.compiles())

    def check_locks(self, workers: Workers) -> None:
        """One compiles and the rest wait; a kill may cost one more compile."""
        most, compiles = workers.most_at_once(), len(workers.compiles())
        self.demand(most <= 1, f"{most} compiles of one kernel at the same time")
        kills = sum(worker.killed is not None for worker in workers.all)
        self.demand(compiles <= 1 + kills, f"{compiles} compiles after {kills} kills")
        heard = [text for worker in workers.all for text in worker.report.get("warnings", ())]
        self.demand(not heard, f"a process warned: {heard[:1]}")

    def check_memory(self, workers: Workers, cached: list[bool], warned: bool) -> None:
        """Each process's first and second look at the cache, and that it warned once, or not."""
        for worker in workers.all:
            heard = worker.report.get("warnings", ())
            as_expected = worker.report.get("cached") == cached and len(heard) == warned
            self.demand(as_expected, f"expected cached {cached}, warned {warned}: {worker.report}")

    def check_folder(self, folder: Path, entries: int) -> None:
        """As many entries as there should be, all intact."""
        present = list(Cache(folder).entries())
        self.demand(len(present) == entries, f"{len(present)} entries instead of {entries}")
        for entry in present:
            try:
                for binary in entry.binaries:
                    entry.read(binary)
            except ArchiveError as error:
                self.demand(False, str(error))

    def check_clear(self, folder: Path) -> None:
        """Clearing leaves the locks and nothing else, whatever killed processes have left."""
        Cache(folder).clear()
        left = [str(p) for p in folder.rglob("*") if p.relative_to(folder).parts[0] != "locks"]
        self.demand(not left, f"clearing leaves {left}")


# --- Scenarios --------------------------------------------------------------------------------


@contextmanager
def _round(outcome: Outcome) -> Iterator[Path]:
    """A new folder, with an empty ``cache`` in it that the workers are going to use."""
    outcome.rounds += 1
    with tempfile.TemporaryDirectory(prefix="stress-cache-") as name:
        cache = Path(name) / "cache"
        cache.mkdir(mode=0o700)
        os.environ["SCAN_REGISTRY_CACHE"] = str(cache)
        yield cache


def _fill(outcome: Outcome, cache: Path, number: int) -> None:
    """Have one process compile, and forget that it did."""
    workers = Workers(cache.parent, 1, lambda: compile_here(number))
    workers.finish(0, random.Random())
    outcome.demand(workers.all[0].status == 0, f"cannot fill: {workers.all[0].report}")
    for path in (workers.log, workers.reports):
        path.unlink(missing_ok=True)


def race(
    outcome: Outcome, rounds: int, kills: float, chance: random.Random, flip: bool = False
) -> None:
    for number in range(rounds):
        with _round(outcome) as cache:
            if flip:
                _fill(outcome, cache, number)
                (entry,) = cache.rglob(f"*{SUFFIX}")
                content = bytearray(entry.read_bytes())
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                entry.write_bytes(content)
            work = lambda number=number: compile_here(number)  # noqa: E731
            workers = Workers(cache.parent, outcome.processes, work)
            workers.finish(round(kills * outcome.processes), chance)
            if flip:
                anew = len(workers.compiles()) == 1
                outcome.demand(anew, "the damaged entry was not compiled anew")
            outcome.check_workers(workers)
            outcome.check_locks(workers)
            outcome.check_folder(cache, 1)
            outcome.check_clear(cache)


def flipped(outcome: Outcome, rounds: int, kills: float, chance: random.Random) -> None:
    race(outcome, rounds, 0, chance, flip=True)


def read_only(outcome: Outcome, rounds: int, kills: float, chance: random.Random) -> None:
    outcome.processes = min(outcome.processes, FEW)

    def work() -> dict[str, Any]:
        _give_up_privileges()
        return compile_here(0, times=2)

    for present in (False, True):
        with _round(outcome) as cache:
            if present:
                _fill(outcome, cache, 0)
            places = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
            for place in places:
                place.chmod(0o500)
            workers = Workers(cache.parent, outcome.processes, work)
            workers.finish(0, chance)
            outcome.check_workers(workers)
            outcome.check_memory(workers, [present, True], warned=not present)
            outcome.check_folder(cache, int(present))
            for place in places:
                place.chmod(0o700)


def full(outcome: Outcome, rounds: int, kills: float, chance: random.Random) -> None:
    outcome.processes = min(outcome.processes, FEW)
    with _round(outcome) as cache:

        def work() -> dict[str, Any]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            return compile_here(0, times=2)

        workers = Workers(cache.parent, outcome.processes, work)
        workers.finish(0, chance)
        outcome.check_workers(workers)
        outcome.check_memory(workers, [False, True], warned=True)
        outcome.check_folder(cache, 0)
        outcome.check_clear(cache)


def _give_up_privileges() -> None:
    """Root writes to any folder; without its capabilities it has the rights of an owner."""
    if os.geteuid() == 0:
        header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
        if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)):
            raise OSError(ctypes.get_errno(), "capset failed")


SCENARIOS: dict[str, Callable[[Outcome, int, float, random.Random], None]] = {
    "race": race,
    "flipped": flipped,
    "read-only": read_only,
    "full": full,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=16, metavar="N", help="(16)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(5)")
    parser.add_argument("--kills", type=float, default=0.2, help="share of the processes (0.2)")
    parser.add_argument("--scenario", choices=[*SCENARIOS], action="append", help="may repeat")
    parser.add_argument("--seed", type=int, default=0, help="of the kills and bits (0)")
    options = parser.parse_args(arguments)
    compiler = jit.toolchains()["cuda"]
    if isinstance(compiler, str):
        print(f"error: {compiler}", file=sys.stderr)
        return 2
    failures = []
    for name in options.scenario or SCENARIOS:
        outcome, began = Outcome(name, options.processes), time.monotonic()
        SCENARIOS[name](outcome, options.rounds, options.kills, random.Random(options.seed))
        print(
            f"{name}: {outcome.rounds} rounds of {outcome.processes} processes, {outcome.kills} killed, "
            f"{outcome.compiles} compiles, {len(outcome.failures)} failures, {time.monotonic() - began:.1f} s"
        )
        failures += outcome.failures
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
