"""``scan-registry verify``: whether what is installed is intact, and what the shipped sources give."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scan_registry.artifact.archive import Binary
from scan_registry.catalog.inventory import Catalogue, survey
from scan_registry.catalog.providers import MISNAMED
from scan_registry.cli import listing
from scan_registry.cli.errors import UsageError
from scan_registry.cli.tables import new_table, say, screen, show
from scan_registry.diagnostics.verify import Comparison, Defect, altered, check, rebuild
from scan_registry.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

JOBS = "SCAN_REGISTRY_JOBS"
OUTCOMES = ("identical", "not comparable")  # which have a column; what is different has a line


@dataclass(frozen=True)
class Result:
    """What was found of one archive.

    defects are those of the checks; ``seconds`` went by in checking and compiling, over all processes.
    """

    listed: listing.Listed
    defects: tuple[Defect, ...]
    seconds: float
    comparisons: tuple[Comparison, ...] = ()

    @property
    def intact(self) -> int:
        """How many binaries have no defect."""
        bad = {defect.binary for defect in self.defects}
        return sum(binary not in bad for binary in self.listed.binaries)

    @property
    def differences(self) -> list[Defect]:
        """What compiling again has shown."""
        return [
            Defect(c.archive.path, c.binary, c.reason)
            for c in self.comparisons
            if c.outcome == "different"
        ]

    def count(self, outcome: str) -> int:
        return sum(comparison.outcome == outcome for comparison in self.comparisons)


@dataclass(frozen=True)
class Report:
    """What was found in all. ``general`` are defects of more than one archive, or of none."""

    rebuilt: bool
    general: tuple[Defect, ...]
    results: tuple[Result, ...]

    @property
    def defects(self) -> list[Defect]:
        defects = list(self.general)
        for result in self.results:
            defects += [*result.defects, *result.differences]
        return defects

    @property
    def checked(self) -> int:
        return sum(len(result.listed.binaries) for result in self.results)

    @property
    def compared(self) -> int:
        return self.count("identical") + self.count("different")

    def count(self, outcome: str) -> int:
        return sum(result.count(outcome) for result in self.results)

    @property
    def install(self) -> list[str]:
        """What pip would have to install to compare what is not comparable for want of its compiler."""
        installs = (c.install for result in self.results for c in result.comparisons if c.install)
        return list(dict.fromkeys(installs))

    @property
    def missing(self) -> str | None:
        """Why the report tells nothing, or None if it does."""
        if not self.checked:
            return "there is nothing to verify: no binary is installed, or none matches"
        if self.rebuilt and not self.compared:
            return "there is nothing to compare: see why each binary is not comparable"
        return None


DESCRIPTION = (
    "Checks every file, manifest and binary against its digest, the binaries' "
    "origin against the shipped sources, what each binary says of itself against its entry, "
    "and what GPUs have measured. Filters may repeat; what is left matches one value of each."
)
EPILOG = (
    "Exit status: 0 if all of it is as stated, and with --rebuild at least one binary was "
    "compared and every one that was is identical; 1 if anything is not; 2 if an argument is "
    "wrong or there is nothing to check or compare."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="compile the binaries again, from the shipped sources with the compilers here, and "
        f"compare the bytes; {JOBS} sets the number of processes",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")
    listing.add_filters(parser)


def run(args: argparse.Namespace) -> int:
    """Check what is installed; ``UsageError`` if that is nothing, or a filter names nothing."""
    workers = _workers()
    installed, general = _installed()
    listed = listing.opened(installed)
    try:
        shown = listing.narrow(listed, listing.filters_of(args)) if listed else []
    except UsageError as error:
        # What is not known to be there may be in what is damaged, or missing.
        shown = [entry for entry in listed if entry.damage]
        if not (shown or general):
            raise
        general.append(Defect(None, None, str(error)))
    results = tuple(_checked(entry, installed) for entry in shown)
    if args.rebuild:
        results = _rebuilt(results, workers)
    report = Report(args.rebuild, tuple(general), results)
    if args.json:
        print(json.dumps(document(report, installed), indent=2))
    else:
        _print(report)
    if report.defects:
        return 1
    if report.missing:
        raise UsageError(report.missing)
    return 0


def _workers() -> int:
    text = os.environ.get(JOBS) or str(len(os.sched_getaffinity(0)))
    if not (text.isdecimal() and int(text)):
        raise UsageError(f"{JOBS} is {text!r}; accepted are 1, 2, 3, …")
    return int(text)


def _installed() -> tuple[Catalogue, list[Defect]]:
    """The catalogue of the packages that can be used, and what is wrong with any package."""
    installed, problems = survey()
    defects = [Defect(None, None, str(problem)) for problem in problems]
    for provider in installed.providers:
        defects += altered(provider)
        defects += [Defect(path, None, MISNAMED) for path in provider.misnamed]
    return installed, defects


def _checked(entry: listing.Listed, installed: Catalogue) -> Result:
    started, defects = time.perf_counter(), []
    if entry.damage:
        reason = entry.damage.removeprefix(f"{entry.archive.path}: ")
        defects.append(Defect(entry.archive.path, None, reason))
    defects += check(entry.archive, entry.binaries, installed.attestations)
    return Result(entry, tuple(defects), time.perf_counter() - started)


def _rebuilt(results: Sequence[Result], workers: int) -> tuple[Result, ...]:
    """The results with a comparison for every binary."""
    from rich.console import Console
    from rich.progress import track

    rows = [(result.listed.archive, b) for result in results for b in result.listed.binaries]
    by_path: dict[Path, list[Comparison]] = {r.listed.archive.path: [] for r in results}
    console = Console(stderr=True)
    for comparison in track(
        rebuild(rows, workers),
        "compiling",
        total=len(rows),
        console=console,
        auto_refresh=False,  # which would take a thread, and a fork copies none
        disable=not console.is_terminal,
    ):
        by_path[comparison.archive.path].append(comparison)
    return tuple(
        replace(
            result,
            comparisons=tuple(comparisons),
            seconds=result.seconds + sum(comparison.seconds for comparison in comparisons),
        )
        for result, comparisons in zip(results, by_path.values(), strict=True)
    )


# --- JSON -------------------------------------------------------------------------------------


def document(report: Report, installed: Catalogue) -> dict[str, Any]:
    """The stable form, described by ``schemas/verify.json``: keys are only ever added."""
    return {
        "version": __version__,
        "rebuilt": report.rebuilt,
        "passed": not report.defects and not report.missing,
        "providers": [
            {"name": provider.name, "version": provider.version, "folder": str(provider.folder)}
            for provider in installed.providers
        ],
        "archives": [
            {
                "arch": str(result.listed.archive.arch),
                "provider": result.listed.archive.provider,
                "path": str(result.listed.archive.path),
                "binaries": len(result.listed.binaries),
                "intact": result.intact,
                "identical": result.count("identical") if report.rebuilt else None,
                "not_comparable": result.count("not comparable") if report.rebuilt else None,
                "seconds": round(result.seconds, 3),
            }
            for result in report.results
        ],
        "defects": [_record(d.path, d.binary, d.reason) for d in report.defects],
        "not_comparable": [
            _record(c.archive.path, c.binary, c.reason)
            for result in report.results
            for c in result.comparisons
            if c.outcome == "not comparable"
        ],
        "install": report.install,
    }


def _record(path: Path | None, binary: Binary | None, reason: str) -> dict[str, Any]:
    return {
        "path": None if path is None else str(path),
        "variant": None if binary is None else str(binary.variant),
        "target": None if binary is None else str(binary.target),
        "reason": reason,
    }


# --- Tables -----------------------------------------------------------------------------------


def _print(report: Report) -> None:
    console = screen()
    providers = listing.several_providers(result.listed for result in report.results)
    table = new_table(
        "arch",
        *(["provider!"] if providers else []),
        *("binaries>", "intact>"),
        *([f"{outcome}>" for outcome in OUTCOMES] if report.rebuilt else []),
        "seconds>",
    )
    for result in report.results:
        archive = result.listed.archive
        intact = f"[red]{result.intact}[/]" if result.defects else str(result.intact)
        table.add_row(
            archive.arch.label,
            *([archive.provider] if providers else []),
            str(len(result.listed.binaries)),
            intact,
            *(map(str, map(result.count, OUTCOMES)) if report.rebuilt else []),
            f"{result.seconds:.2f}",
        )
    console.print(f"[bold]scan-registry {__version__}[/]")
    if report.results:
        show(console, table)
        console.print()
    for text, times in _obstacles(report).items():
        _line(console, f"not comparable: {times} of {text}")
    if report.install:
        _line(console, f"to compare these, too: pip install {' '.join(report.install)}")
    for defect in report.defects:
        _line(console, f"defect: {defect}")
    console.print(_summary(report))


def _obstacles(report: Report) -> Counter[str]:
    """How many binaries are not comparable, by archive and reason."""
    return Counter(
        f"{c.archive.arch.label}, {c.reason}"
        for result in report.results
        for c in result.comparisons
        if c.outcome == "not comparable"
    )


def _summary(report: Report) -> str:
    intact = sum(result.intact for result in report.results)
    parts = [f"{intact} of {report.checked} binaries intact"]
    if report.rebuilt:
        parts.append(f"{report.count('identical')} of {report.compared} compared are identical")
    count = len(report.defects)
    parts.append(f"{count} defect{'' if count == 1 else 's'}")
    return ", ".join(parts)


def _line(console: Console, text: str) -> None:
    """Print as one line, which only a terminal folds."""
    words = " / ".join(line.strip() for line in text.splitlines() if line.strip())
    say(console, words)
