"""``scan-registry inspect``: which binaries are installed, from which build, and how many a GPU has tested."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.catalog.inventory import Catalogue, catalogue
from scan_registry.cli import listing
from scan_registry.cli.streams import complain
from scan_registry.cli.tables import new_table, say, screen, show
from scan_registry.kernels.model import Static
from scan_registry.ops.operator import SHORT_DTYPES
from scan_registry.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

MOST_ROWS = 60  # of the list that a filter may ask for without saying --all
MOST_LINES = 40  # of what is printed without options

Row = tuple[Archive, Binary]

_LEGEND = """
variants: on each arch; regs: registers per thread; shared: memory per block. One row per binary: --all, or \
a filter such as --arch. Are all bytes intact? `scan-registry verify`"""
_BINARIES_LEGEND = """
regs, spill: registers and spilled bytes per thread; shared: bytes per block, static + dynamic; ?: the \
driver decides. GPU-tested: the relative error measured on a GPU; !: beyond tolerance."""

NOTHING = """\
This installation of scan-registry {version} holds no archives, so no GPU kernel can run from it;
backend="reference" works. `pip install scan-registry-sm90` adds those for one architecture, here 9.0
(`scan-registry doctor` says which your GPU needs); SCAN_REGISTRY_ARCHS=sm90 pip install <source folder>
builds them."""


DESCRIPTION = (
    "Lists the installed archives and kernels, one line each. With --all, --json or a "
    "filter, lists their binaries, after checking each against its digest, as `scan-registry verify` "
    "does. Filters may repeat; what is left matches one value of each."
)
EPILOG = "Exit status: 0, or 2 if an archive is damaged, a filter names nothing installed or no binary matches all filters."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--all", action="store_true", help="one row per binary, however many")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")
    listing.add_filters(parser)


def run(args: argparse.Namespace) -> int:
    """List what is installed; ``UsageError`` if a filter names nothing installed."""
    installed, wanted = catalogue(), listing.filters_of(args)
    filtered = any(wanted.values())
    # Reading every byte takes seconds, and a list of kernels needs none of them.
    listed = (listing.read if args.all or args.json or filtered else listing.opened)(installed)
    for file in installed.ignored:
        complain(f"scan-registry: warning: {file}")
    for entry in listed:
        if entry.damage:
            complain(f"scan-registry: error: {entry.damage}")
    shown = listing.narrow(listed, wanted) if listed else []
    if args.json:
        print(json.dumps(document(shown, installed), indent=2))
    else:
        _print(shown, installed, filtered=filtered, everything=args.all)
    damaged = any(entry.damage for entry in listed)
    if filtered and listed and not any(entry.binaries for entry in shown):
        complain("scan-registry: error: no binary matches all of these filters")
        return 2
    return 2 if damaged else 0


# --- JSON -------------------------------------------------------------------------------------


def document(listed: Iterable[listing.Listed], installed: Catalogue) -> dict[str, Any]:
    """The stable form: keys are only ever added.

    An archive's ``error`` is null, or says what is wrong with it; then the facts of its manifest
    are null and it lists no binaries.
    """
    return {
        "version": __version__,
        "archives": [_archive_record(entry, installed) for entry in listed],
    }


def _archive_record(entry: listing.Listed, installed: Catalogue) -> dict[str, Any]:
    manifest = {} if entry.damage else entry.archive.manifest
    return {
        "arch": str(entry.archive.arch),
        "provider": entry.archive.provider,
        "path": str(entry.archive.path),
        "size": _file_size(entry.archive),
        "version": manifest.get("version"),
        "commit": manifest.get("commit"),
        "dirty": manifest.get("dirty"),
        "error": entry.damage,
        "binaries": [_binary_record(binary, installed) for binary in entry.binaries],
    }


def _binary_record(binary: Binary, installed: Catalogue) -> dict[str, Any]:
    attestation = installed.attestations.get(binary.sha256)
    return {
        **binary.to_json(),
        "attestation": asdict(attestation) if attestation else None,
        "gpu_tested": installed.is_gpu_tested(binary),
    }


def _file_size(archive: Archive) -> int | None:
    return archive.path.stat().st_size if archive.path.is_file() else None


# --- Tables -----------------------------------------------------------------------------------


def _print(
    listed: Sequence[listing.Listed], installed: Catalogue, *, filtered: bool, everything: bool
) -> None:
    console = screen()
    if not installed.archives:
        say(console, NOTHING.format(version=__version__))
        return
    rows = [(entry.archive, binary) for entry in listed for binary in entry.binaries]
    lines = _print_archives(console, listed, installed)
    if everything or (filtered and len(rows) <= MOST_ROWS):
        _print_binaries(console, rows, installed, providers=listing.several_providers(listed))
    else:
        _print_kernels(console, rows, installed, MOST_LINES - lines)


def _print_archives(
    console: Console, listed: Sequence[listing.Listed], installed: Catalogue
) -> int:
    """Print a line for each, and return how many lines there are."""
    console.print(f"[bold]scan-registry {__version__}[/]")
    folders = dict.fromkeys(archive.path.parent for archive in installed.archives)
    for folder in folders:
        say(console, f"archives in {folder}")
    providers = listing.several_providers(listed)
    table = new_table(
        "arch!",
        *(["provider!"] if providers else []),
        *("size>?", "binaries>", "GPU-tested>!", "on?", "toolchain?", "source"),
    )
    for entry in listed:
        label, size = entry.archive.arch.label, listing.size_text(_file_size(entry.archive))
        start = [label, entry.archive.provider, size] if providers else [label, size]
        if entry.damage:
            table.add_row(*start, "", "[red]damaged[/]", "", "", "")
            continue
        binaries = entry.archive.binaries
        gpus = {
            installed.attestations[b.sha256].gpu for b in binaries if installed.is_gpu_tested(b)
        }
        table.add_row(
            *start,
            str(len(binaries)),
            _gpu_tested(binaries, installed),
            ", ".join(sorted(gpus)) or "–",
            ", ".join(dict.fromkeys(binary.compiler for binary in binaries)),
            _source(entry.archive),
        )
    show(console, table)
    return 5 + len(folders) + len(table.rows)


def _source(archive: Archive) -> str:
    """The version and the commit that it was compiled from."""
    manifest = archive.manifest
    commit, dirty = manifest.get("commit"), manifest.get("dirty")
    source = f"{commit[:10]}{' (dirty)' if dirty else ''}" if commit else "unknown"
    return f"{manifest.get('version', '')} {source}".strip()


def _print_kernels(
    console: Console, rows: Sequence[Row], installed: Catalogue, most_lines: int
) -> None:
    """Print a line for each; if these are more than that, one line for each of the families that have the most kernels."""
    table = new_table(
        *("kernel", "languages", "dtypes", "archs", "variants>", "regs>?", "shared>?", "size>?"),
        "GPU-tested>!",
    )
    everything = dict.fromkeys(archive.arch.label for archive, _ in rows)
    kernels: dict[str, list[Row]] = {}
    for archive, binary in rows:
        variant = binary.variant
        kernels.setdefault(f"{variant.family}.{variant.kernel}", []).append((archive, binary))
    summed = _summed_families(list(kernels), most_lines - 7)
    by_line: dict[str, list[Row]] = {}
    for name, group in kernels.items():
        family = name.partition(".")[0]
        by_line.setdefault(summed.get(family, name), []).extend(group)
    for name, group in by_line.items():
        archs = dict.fromkeys(archive.arch.label for archive, _ in group)
        every_arch = archs == everything and len(archs) > 1
        label = f"all {len(archs)}" if every_arch else " ".join(archs)
        table.add_row(name, *_kernel_cells([binary for _, binary in group], label, installed))
    if rows:
        show(console, table)
        if summed:
            console.print("--family lists the kernels of one family")
        say(console, _LEGEND, "dim")


def _summed_families(kernels: Sequence[str], most: int) -> dict[str, str]:
    """The families to print in one line each so that there are at most so many lines, and what the lines begin with. Each
    family has a line, however few lines are asked for."""
    sizes = Counter(name.partition(".")[0] for name in kernels)
    lines, summed = len(kernels), {}
    for family, size in sizes.most_common():
        if lines <= most or size == 1:
            break
        summed[family] = f"{family}: {size} kernels"
        lines -= size - 1
    return summed


def _kernel_cells(binaries: Sequence[Binary], archs: str, installed: Catalogue) -> tuple[str, ...]:
    """What the table says of one kernel's binaries, after its name."""
    statics = (dict(binary.variant.statics).get("dtype", "") for binary in binaries)
    return (
        " ".join(dict.fromkeys(binary.variant.language for binary in binaries)),
        " ".join(dict.fromkeys(map(_short, statics))),
        archs,
        str(len({binary.variant for binary in binaries})),
        _range([b.registers for b in binaries if b.registers is not None], str),
        _range([b.shared for b in binaries], listing.size_text),
        _range([b.size for b in binaries], listing.size_text),
        _gpu_tested(binaries, installed),
    )


def _print_binaries(
    console: Console, rows: Sequence[Row], installed: Catalogue, *, providers: bool
) -> None:
    for group in _by_kernel(rows):
        variant = group[0][1].variant
        # Variants of one kernel have the same static parameters, so each gets a column.
        statics = {name: value for _, b in group for name, value in b.variant.statics}
        table = new_table(
            "arch",
            *(["provider!"] if providers else []),
            *(
                f"{name}>!" if isinstance(value, int) else f"{name}!"
                for name, value in statics.items()
            ),
            *("regs>", "spill>?", "shared>?", "threads>?", "size>?", "GPU-tested"),
        )
        for archive, binary in group:
            values = dict(binary.variant.statics)
            table.add_row(
                binary.target.label,
                *([archive.provider] if providers else []),
                *(_short(values.get(name, "")) for name in statics),
                _optional(binary.registers),
                _optional(binary.spill_bytes),
                f"{_optional(binary.static_shared)}+{binary.dynamic_shared}",
                str(binary.threads),
                listing.size_text(binary.size),
                _gpu_test(binary, installed),
            )
        show(console, table, f"[bold]{variant.family}.{variant.kernel}[/], {variant.language}")
    if rows:
        say(console, _BINARIES_LEGEND, "dim")


def _short(value: Static) -> str:
    return SHORT_DTYPES.get(str(value), str(value))


def _gpu_test(binary: Binary, installed: Catalogue) -> str:
    attestation = installed.attestations.get(binary.sha256)
    if attestation is None:
        return "no"
    error = f"{attestation.error:.1e}"
    return error if attestation.passed else f"[red]! {error}[/]"


def _gpu_tested(binaries: Sequence[Binary], installed: Catalogue) -> str:
    return f"{sum(map(installed.is_gpu_tested, binaries))}/{len(binaries)}"


def _by_kernel(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows by kernel and then language, each in the order in which it first appears."""
    kernels: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for archive, binary in rows:
        variant = binary.variant
        languages = kernels.setdefault((variant.family, variant.kernel), {})
        languages.setdefault(variant.language, []).append((archive, binary))
    return [group for languages in kernels.values() for group in languages.values()]


def _optional(value: int | None) -> str:
    return "?" if value is None else str(value)


def _range(values: Sequence[int], text: Callable[[int], str]) -> str:
    if not values:
        return "?"
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} – {high}"
