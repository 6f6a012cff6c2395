"""Try to break the cache of compiled kernels: many processes, kills, bad bits, disks that refuse.

    python tools/stress_cache.py --processes 64 --rounds 20 --kills 0.2
    python tools/stress_cache.py --scenario full

Needs NVRTC and no GPU. Scenarios, all of them unless one is named:

    race       processes that are forked together compile one kernel into one empty folder, while
               some of them, and above all the one that is compiling, are killed
    flipped    the same with a folder whose entry has a flipped bit, and no kills
    read-only  at most 8 processes, a folder that they cannot write to: empty, then filled
    full       at most 8 processes, a file system that is full: a small tmpfs where this user may
               mount one, else a limit on the size of files

A violation is a process that fails or gets other bytes than the rest, an entry that is not intact,
a compile beside another of the same kernel where there are locks, a compile too many, or something
that clearing the cache leaves behind. Any makes the exit status 1.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gang import Flight, Gang, Worker
from rich.console import Console
from rich.table import Table

from scan_registry.artifact.archive import SUFFIX, ArchiveError, digest
from scan_registry.cache.store import Cache, CacheWarning
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.runtime import jit

TARGET = Target.parse("sm90")
VARIANTS = FAMILY.kernel("time_last_forward", "cuda").variants
FEW = 8  # processes where each has to compile
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3


@dataclass
class Outcome:
    """What came of a scenario; a row of the table.

    most_in_flight  compiles of one kernel at the same time
    bad_entries     entries that were not intact at the end of a round
    failures        everything that should not have been
    """

    scenario: str
    processes: int
    rounds: int = 0
    kills: int = 0
    compiles: int = 0
    most_in_flight: int = 0
    bad_entries: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    note: str = ""

    def demand(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(f"round {self.rounds}: {what}")


# --- Work -----------------------------------------------------------------------------------------


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


def most_in_flight(flights: Sequence[Flight], workers: Sequence[Worker]) -> int:
    """Compiles of one kernel at one time. A killed process ended its compile when it was killed."""
    killed = {worker.pid: worker.killed for worker in workers}
    changes = []
    for flight in flights:
        end = flight.end or killed.get(flight.pid) or time.monotonic_ns()
        changes += [(flight.begin, 1, flight.key), (end, -1, flight.key)]
    now: dict[str, int] = {}
    most = 0
    for _, change, key in sorted(changes):
        now[key] = now.get(key, 0) + change
        most = max(most, now[key])
    return most


def check_workers(outcome: Outcome, gang: Gang) -> None:
    """Every process that was not killed has succeeded, and all have the same bytes."""
    got = set()
    for worker in gang.workers:
        if worker.status == -signal.SIGKILL and worker.killed is not None:
            outcome.kills += 1
            continue
        what = worker.said.get("failure") or f"a process ended with {worker.status}"
        outcome.demand(worker.status == 0, what)
        got.update(worker.said.get("sha256", ()))
    outcome.demand(len(got) <= 1, f"processes have different binaries: {sorted(got)}")
    flights = gang.flights()
    outcome.compiles += len(flights)
    most = most_in_flight(flights, gang.workers)
    outcome.most_in_flight = max(outcome.most_in_flight, most)


def check_turns(outcome: Outcome, gang: Gang) -> None:
    """Where there are locks, one compiles and the rest wait; a kill may cost one more compile."""
    flights = gang.flights()
    most = most_in_flight(flights, gang.workers)
    outcome.demand(most <= 1, f"{most} compiles of one kernel at the same time")
    kills = sum(worker.killed is not None for worker in gang.workers)
    outcome.demand(len(flights) <= 1 + kills, f"{len(flights)} compiles after {kills} kills")
    heard = [text for worker in gang.workers for text in worker.said.get("warnings", ())]
    outcome.demand(not heard, f"a process warned: {heard[:1]}")


def check_memory(outcome: Outcome, gang: Gang, cached: list[bool], warned: bool) -> None:
    """What each process found at its first and second look, and whether it warned: once."""
    for worker in gang.workers:
        heard = worker.said.get("warnings", ())
        as_expected = worker.said.get("cached") == cached and len(heard) == warned
        outcome.demand(as_expected, f"expected cached {cached}, warned {warned}: {worker.said}")


def check_folder(outcome: Outcome, folder: Path, entries: int) -> None:
    """As many entries as there should be, all intact."""
    found = list(Cache(folder).entries())
    outcome.demand(len(found) == entries, f"{len(found)} entries instead of {entries}")
    for entry in found:
        try:
            for binary in entry.binaries:
                entry.read(binary)
        except ArchiveError as error:
            outcome.bad_entries += 1
            outcome.demand(False, str(error))


def check_clear(outcome: Outcome, folder: Path) -> None:
    """Clearing leaves the locks and nothing else, whatever killed processes have left."""
    Cache(folder).clear()
    left = [str(path) for path in folder.rglob("*") if path.relative_to(folder).parts[0] != "locks"]
    outcome.demand(not left, f"clearing leaves {left}")


# --- Scenarios --------------------------------------------------------------------------------


@contextmanager
def _round(outcome: Outcome) -> Iterator[Path]:
    """A new folder, with an empty ``cache`` in it that the workers are going to use."""
    outcome.rounds += 1
    with tempfile.TemporaryDirectory(prefix="stress-cache-") as name:
        folder = Path(name)
        cache = folder / "cache"
        cache.mkdir(mode=0o700)
        os.environ["SCAN_REGISTRY_CACHE"] = str(cache)
        yield folder


def _fill(outcome: Outcome, folder: Path, number: int) -> None:
    """Have one process compile, and forget that it did."""
    gang = Gang(folder, 1, lambda: compile_here(number))
    gang.finish(0, random.Random())
    outcome.demand(gang.workers[0].status == 0, f"cannot fill: {gang.workers[0].said}")
    for path in (folder / "log", folder / "said"):
        path.unlink(missing_ok=True)


def race(outcome: Outcome, rounds: int, kills: float, chance: random.Random) -> None:
    for number in range(rounds):
        with _round(outcome) as folder:
            gang = _stampede(outcome, folder, number)
            gang.finish(round(kills * outcome.processes), chance)
            _check_stampede(outcome, gang, folder)


def flipped(outcome: Outcome, rounds: int, kills: float, chance: random.Random) -> None:
    for number in range(rounds):
        with _round(outcome) as folder:
            _fill(outcome, folder, number)
            (entry,) = (folder / "cache").rglob(f"*{SUFFIX}")
            content = bytearray(entry.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            entry.write_bytes(content)
            gang = _stampede(outcome, folder, number)
            gang.finish(0, chance)
            outcome.demand(len(gang.flights()) == 1, "the damaged entry was not compiled anew")
            _check_stampede(outcome, gang, folder)


def _stampede(outcome: Outcome, folder: Path, number: int) -> Gang:
    return Gang(folder, outcome.processes, lambda: compile_here(number))


def _check_stampede(outcome: Outcome, gang: Gang, folder: Path) -> None:
    check_workers(outcome, gang)
    check_turns(outcome, gang)
    check_folder(outcome, folder / "cache", 1)
    check_clear(outcome, folder / "cache")


def read_only(outcome: Outcome, rounds: int, kills: float, chance: random.Random) -> None:
    outcome.processes = min(outcome.processes, FEW)

    def work(number: int) -> dict[str, Any]:
        _give_up_privileges()
        return compile_here(number, times=2)

    for filled in (False, True):
        with _round(outcome) as folder:
            cache = folder / "cache"
            if filled:
                _fill(outcome, folder, 0)
            places = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
            for place in places:
                place.chmod(0o500)
            gang = Gang(folder, outcome.processes, lambda: work(0))
            gang.finish(0, chance)
            check_workers(outcome, gang)
            check_memory(outcome, gang, [filled, True], warned=not filled)
            check_folder(outcome, cache, int(filled))
            for place in places:
                place.chmod(0o700)


def full(outcome: Outcome, rounds: int, kills: float, chance: random.Random) -> None:
    outcome.processes = min(outcome.processes, FEW)
    with _round(outcome) as folder:
        mounted = _mount(folder / "cache")
        outcome.note = "tmpfs" if mounted else "no mount: files limited to 4 KiB"

        def work() -> dict[str, Any]:
            if not mounted:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            return compile_here(0, times=2)

        try:
            gang = Gang(folder, outcome.processes, work)
            gang.finish(0, chance)
            check_workers(outcome, gang)
            check_memory(outcome, gang, [False, True], warned=True)
            check_folder(outcome, folder / "cache", 0)
            check_clear(outcome, folder / "cache")
        finally:
            if mounted:
                subprocess.run(["umount", folder / "cache"], check=True)


def _give_up_privileges() -> None:
    """Root writes to any folder; without its capabilities it has the rights of an owner."""
    if os.geteuid() == 0:
        header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
        if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)):
            raise OSError(ctypes.get_errno(), "capset failed")


def _mount(folder: Path) -> bool:
    """Mount a tmpfs with room for the locks and folders, and not for an entry, if that is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


Scenario = Callable[[Outcome, int, float, random.Random], None]
SCENARIOS: dict[str, Scenario] = {
    "race": race,
    "flipped": flipped,
    "read-only": read_only,
    "full": full,
}


# --- Command line -----------------------------------------------------------------------------


def table(outcomes: Sequence[Outcome]) -> Table:
    view = Table(title="Stress on the cache")
    view.add_column("scenario", no_wrap=True)
    for heading in ("rounds", "processes", "kills", "compiles", "most in flight\nper key"):
        view.add_column(heading, justify="right")
    for heading in ("bad entries", "failures", "seconds"):
        view.add_column(heading, justify="right")
    view.add_column("")
    for row in outcomes:
        numbers = (row.rounds, row.processes, row.kills, row.compiles, row.most_in_flight)
        ends = (row.bad_entries, len(row.failures), f"{row.seconds:.1f}", row.note)
        view.add_row(row.scenario, *map(str, numbers), *map(str, ends))
    return view


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and less than 1")
    return share


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=_positive, default=16, metavar="N", help="(16)")
    parser.add_argument("--rounds", type=_positive, default=5, metavar="N", help="(5)")
    parser.add_argument(
        "--kills", type=_share, default=0.2, metavar="SHARE", help="of the processes (0.2)"
    )
    parser.add_argument("--scenario", choices=[*SCENARIOS], help="one instead of all")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the kills and bits (0)"
    )
    options = parser.parse_args(arguments)
    compiler = jit.toolchains()["cuda"]
    if isinstance(compiler, str):
        print(f"error: {compiler}", file=sys.stderr)
        return 2
    outcomes = []
    for name in [options.scenario] if options.scenario else SCENARIOS:
        outcome, started = Outcome(name, options.processes), time.monotonic()
        SCENARIOS[name](outcome, options.rounds, options.kills, random.Random(options.seed))
        outcome.seconds = time.monotonic() - started
        outcomes.append(outcome)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table(outcomes))
    failures = [f"{row.scenario}: {failure}" for row in outcomes for failure in row.failures]
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
