"""``scan-registry cache``: what this machine has compiled for itself, and shipping it to others."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scan_registry.cache.store import Cache, jit_cache
from scan_registry.cache.tuned import LocalTuning, tuned_cache, tuned_contents
from scan_registry.catalog.inventory import catalogue
from scan_registry.catalog.providers import CORE
from scan_registry.cli.errors import UsageError
from scan_registry.cli.listing import arch_label, not_there, size_text
from scan_registry.cli.tables import new_table, say, screen, show
from scan_registry.hardware.products import names
from scan_registry.packaging.export import Cached, Choice, choose, contents, exported
from scan_registry.packaging.package import Package
from scan_registry.version import __version__

_LABEL = re.compile(r"[a-z0-9]+([-_][a-z0-9]+)*")
#: Packages that this project releases are named after architectures alone.
_ARCHITECTURE = r"(sm|ptx|compute)[-_]?\d+[af]?"
_OFFICIAL = re.compile(rf"{_ARCHITECTURE}([-_]{_ARCHITECTURE})*")


DESCRIPTION = (
    "What this machine has compiled because nothing installed was built for it, and "
    "what `scan-registry tune` found on its GPUs. "
    "SCAN_REGISTRY_CACHE chooses the folder."
)
EPILOG = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own commands and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    listed = actions.add_parser(
        "list",
        help="one row per binary",
        description="Lists what was compiled here, after checking each binary against its digest. "
        "Stale is what the installed sources no longer give; it is never used again.",
        epilog="Exit status: 0, or 1 if an entry is damaged or the folder cannot be used. A damaged entry is compiled again when "
        "it is needed.",
    )
    cleared = actions.add_parser("clear", help="delete all of it", description="Deletes all of it.")
    exported = actions.add_parser(
        "export",
        help="make a package of it, for machines of the same kind",
        description="Writes a folder that pip installs beside scan-registry: an archive for each "
        "architecture, which then comes before anything is compiled. Stale, damaged and denied "
        "binaries are left out, and of several for one variant all but the newest compiler's.",
    )
    exported.add_argument("folder", type=Path, metavar="DIR", help="to be made; may exist if empty")
    exported.add_argument(
        "--name",
        metavar="NAME",
        help=f"of the package: {CORE}-NAME; default: jit and its architectures, as jit-sm90",
    )
    exported.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="X",
        help="such as sm90, sm_103 or H100; may repeat; default: every one that is there",
    )
    exported.add_argument(
        "--wheel", action="store_true", help="also write the wheel, into DIR/dist; nothing is built"
    )
    for action in (listed, cleared, exported):
        action.add_argument("--json", action="store_true", help="print a JSON document instead")


def run(args: argparse.Namespace) -> int:
    """Run the action that was named."""
    actions: Mapping[str, Callable[[Cache, argparse.Namespace], int]] = {
        "list": _list,
        "clear": _clear,
        "export": _export,
    }
    return actions[args.action](jit_cache(), args)


def obstacle(cache: Cache) -> str | None:
    """Why nothing can be kept in the cache's folder, or None."""
    if reason := cache.refusal():
        return reason
    place = cache.folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return None
    return f"you cannot write to {place}"


# --- list -------------------------------------------------------------------------------------


def _list(cache: Cache, args: argparse.Namespace) -> int:
    entries, tuned = list(contents(cache)), list(tuned_contents())
    if args.json:
        print(json.dumps(list_document(cache, entries, tuned), indent=2))
    else:
        _print_list(cache, entries)
        _print_tuned(tuned)
    damage = [*(entry.damage for entry in entries), *(local.damage for local in tuned)]
    return 1 if any(damage) or obstacle(cache) else 0


def list_document(
    cache: Cache, entries: Sequence[Cached], tuned: Sequence[LocalTuning]
) -> dict[str, Any]:
    """The stable form, described by ``schemas/cache-list.json``: keys are only ever added."""
    reason = obstacle(cache)
    return {
        "folder": str(cache.folder),
        "usable": reason is None,
        "obstacle": reason,
        "bytes": sum(entry.size for entry in entries),
        "entries": [
            {
                "path": str(entry.archive.path),
                "state": entry.state,
                "reason": entry.damage or entry.stale,
                "variant": str(entry.binary.variant) if entry.binary else None,
                "target": str(entry.binary.target) if entry.binary else None,
                "compiler": entry.binary.compiler if entry.binary else None,
                "sha256": entry.binary.sha256 if entry.binary else None,
                "bytes": entry.size,
                "age": max(0, round(time.time() - entry.modified)),
            }
            for entry in entries
        ],
        "tuned": [
            {
                "path": str(local.archive.path),
                "state": local.state,
                "reason": local.damage or local.stale,
                "gpu": local.gpu,
                "date": local.date,
                "kernels": list(local.kernels),
                "binaries": local.binaries,
                "bytes": local.size,
            }
            for local in tuned
        ],
    }


def _print_tuned(tuned: Sequence[LocalTuning]) -> None:
    """What was tuned here; nothing if nothing was."""
    if not tuned:
        return
    console = screen()
    table = new_table("tuned on", "date?", "kernels?", "binaries>", "size>", "state!")
    for local in tuned:
        state = f"[red]{local.state}[/]" if local.damage else local.state
        kernels = ", ".join(head.partition(".")[2] for head in local.kernels)
        size = size_text(local.size)
        table.add_row(local.gpu or "", local.date or "", kernels, str(local.binaries), size, state)
    show(console, table)
    for local in tuned:
        if local.state != "current":
            text = f"{local.state}: {local.archive.path}: {local.damage or local.stale}"
            say(console, text)


def _print_list(cache: Cache, entries: Sequence[Cached]) -> None:
    console = screen()
    say(console, f"folder {cache.folder}")
    if reason := obstacle(cache):
        say(console, f"not usable: {reason}", "red")
    table = new_table("variant", "target!", "compiler?", "size>?", "age>?", "state!")
    for entry in entries:
        binary = entry.binary
        state = f"[red]{entry.state}[/]" if entry.damage else entry.state
        table.add_row(
            str(binary.variant) if binary else entry.archive.path.parent.name,
            str(binary.target) if binary else entry.archive.path.stem,
            binary.compiler if binary else "",
            size_text(entry.size),
            age_text(time.time() - entry.modified),
            state,
        )
    if entries:
        show(console, table)
        console.print()
    for entry in entries:
        if entry.state != "current":
            text = f"{entry.state}: {entry.archive.path}: {entry.damage or entry.stale}"
            say(console, text)
    total = sum(entry.size for entry in entries)
    console.print(f"{_counted(len(entries), 'binary', 'binaries')}, {size_text(total)}")


def age_text(seconds: float) -> str:
    """``5 min``, ``3 h`` or ``12 d``."""
    if seconds < 3600:
        return f"{max(0, seconds) // 60:.0f} min"
    return f"{seconds // 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds // 86400:.0f} d"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


# --- clear ------------------------------------------------------------------------------------


def _clear(cache: Cache, args: argparse.Namespace) -> int:
    tunings, sizes, counts = tuned_cache(), 0, []
    for place in (cache, tunings):
        for entry in place.entries():
            with suppress(FileNotFoundError):  # somebody else is clearing it
                sizes += entry.path.stat().st_size
        try:
            counts.append(place.clear())
        except OSError as error:
            raise UsageError(f"{place.folder} cannot be cleared: {error}") from error
    count, tuned = counts
    if args.json:
        document = {"folder": str(cache.folder), "entries": count, "bytes": sizes, "tuned": tuned}
        print(json.dumps(document, indent=2))
    else:
        files = f" and what was tuned on {_counted(tuned, 'GPU', 'GPUs')}" if tuned else ""
        contents = f"{_counted(count, 'binary', 'binaries')}{files}"
        text = f"deleted {contents}, {size_text(sizes)}, from {cache.folder}"
        say(screen(), text)
    return 0


# --- export -----------------------------------------------------------------------------------


def _export(cache: Cache, args: argparse.Namespace) -> int:
    folder: Path = args.folder
    if args.name is not None and not _LABEL.fullmatch(args.name):
        raise UsageError(
            f"--name {args.name!r} does not name a package; accepted are lower-case letters and "
            "digits, in words joined by - or _"
        )
    if args.name is not None and _OFFICIAL.fullmatch(args.name):
        raise UsageError(
            f"--name {args.name!r}: {CORE}-{args.name} is kept for packages that are released with "
            f"{CORE} itself; accepted is a name with another word in it, such as my-{args.name}"
        )
    choice = _chosen(cache, args.arch)
    label = args.name or "-".join(["jit", *(target.label for target in choice.taken)])
    package = exported(label, __version__, choice.taken)
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; name a folder that is, or none")
        package.write(folder)
        wheel = package.wheel().write(folder / "dist") if args.wheel else None
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}") from error
    if args.json:
        print(json.dumps(export_document(package, choice, folder, wheel), indent=2))
    else:
        _print_export(package, choice, folder, wheel)
    return 0


def _chosen(cache: Cache, archs: Sequence[str]) -> Choice:
    """What to export; ``UsageError`` if that is nothing."""
    if reason := cache.refusal():
        raise UsageError(f"nothing in {cache.folder} is used: {reason}")
    entries = list(contents(cache))
    if not entries:
        raise UsageError(
            f"{cache.folder} is empty; run on a GPU that no installed archive was built for, and "
            "what is compiled there will be in it"
        )
    there = dict.fromkeys(entry.archive.arch.label for entry in entries if entry.binary)
    for text in archs:
        if (label := arch_label(text)) not in there:
            raise UsageError(not_there("--arch", text, label, "in the cache", [*there], names()))
    wanted = {arch_label(text) for text in archs} or set(there)
    chosen = [e for e in entries if e.binary is None or e.archive.arch.label in wanted]
    choice = choose(chosen, catalogue().denied)
    if not choice.taken:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in choice.left_out))
        raise UsageError(f"{cache.folder} holds nothing to export: {reasons}")
    return choice


def export_document(
    package: Package, choice: Choice, folder: Path, wheel: Path | None
) -> dict[str, Any]:
    """The stable form, described by ``schemas/cache-export.json``: keys are only ever added."""
    return {
        "name": package.name,
        "version": package.version,
        "core": package.core,
        "folder": str(folder),
        "wheel": str(wheel) if wheel else None,
        "archives": [
            {"arch": str(target), "binaries": len(entries)}
            for target, entries in choice.taken.items()
        ],
        "left_out": [
            {"path": str(entry.archive.path), "state": entry.state, "reason": reason}
            for entry, reason in choice.left_out
        ],
    }


def _print_export(package: Package, choice: Choice, folder: Path, wheel: Path | None) -> None:
    console = screen()

    def line(text: str) -> None:
        say(console, text)

    line(f"{package.name} {package.version}, for {CORE} {package.core}, in {folder}")
    for target, entries in choice.taken.items():
        line(f"  {target.label}: {_counted(len(entries), 'binary', 'binaries')}")
    for entry, reason in choice.left_out:
        subject = str(entry.binary) if entry.binary else str(entry.archive.path)
        line(f"left out: {subject}: {reason}")
    line(f"install it: pip install {wheel or folder}")
