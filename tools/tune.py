"""Tune the kernels on this GPU, and record every timing beside their specs.

    python tools/tune.py                         every kernel, dtype and shape that is usual
    python tools/tune.py --language cuda --dtype bf16 --budget 400
    python tools/tune.py --shapes time_last:8,1536,4096 --kernel time_last_forward
    python tools/tune.py --known --installed     what wheels hold, on every problem that the architecture's
                                                 table has: for another GPU of it
    python tools/tune.py --only 'prefix_lead=2'        the variants that somebody works on, beside what is chosen now;
                                                 of others the tables keep earlier times

It writes ``kernels/<family>/tuning/<arch>.json`` after every kernel and kind, so that nothing is lost
where a machine goes away; where that file is of another GPU, ``<arch>-<gpu>.json``, for those of this name
alone. Problems that are in the file already are replaced, others stay. The next wheel holds what the file
names, of one for GPUs of a name alone what gains enough beside the other, and its archives the rows. Last it
says how far the installed choices were from the best.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scan_registry.catalog.inventory import catalogue
from scan_registry.cli.errors import UsageError
from scan_registry.cli.tune import add_choice, chosen, show_report, tuner_for, wanted, watched
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Family, Variant
from scan_registry.kernels.tables import FOLDER, Table, forget_reduced
from scan_registry.ops.benchmark import Case
from scan_registry.ops.operator import operators
from scan_registry.tuner.engine import TuningResult

FAMILIES = Path(__file__).parents[1] / "kernels"


def save(
    folder: Path,
    arch: str,
    tuned: list[TuningResult],
    only: Callable[[Variant], bool] = lambda _: True,
) -> list[Path]:
    """Add what was measured to the families' tables in ``folder``; return the files. Rows keep the times of
    variants that were not ``only`` to be timed, while there are such variants."""
    written = []
    families = {result.posed.family.name: result.posed.family for result in tuned}
    for name, family in families.items():
        path, table = place(folder, name, arch, tuned[0].measured.run.gpu)
        newer = [result.measured for result in tuned if result.posed.family.name == name]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        table = table.with_newer(newer, lambda name: only(Variant.parse(name)))
        partial.write_text(current(family, table).text(), encoding="utf-8")
        forget_reduced(folder / name)
        partial.replace(path)
        written.append(path)
    return written


def current(family: Family, table: Table) -> Table:
    """The table without the times of variants that there are no longer."""
    labels = {
        kernel.head: {kernel.label(variant) for variant in kernel.every}
        for kernel in family.kernels
    }
    kept = (measured.of(labels.get(measured.kernel, ())) for measured in table.measured)
    return replace(table, measured=tuple(measured for measured in kept if measured.timings))


def general(arch: str) -> str:
    """The name of a file that is for all GPUs of an architecture."""
    return f"{arch.replace('_', '')}.json"


def place(folder: Path, family: str, arch: str, gpu: str) -> tuple[Path, Table]:
    """The file for what is measured on a GPU, and what is in it."""
    path = folder / family / FOLDER / general(arch)
    table = Table.read(path) if path.exists() else Table(family, arch)
    if table.gpus in ((), (gpu,)):
        return path, table
    words = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")
    path = path.with_stem(f"{path.stem}-{words}")
    return path, Table.read(path) if path.exists() else Table(family, arch, exclusive=True)


def known(folder: Path, arch: str) -> list[Case]:
    """The cases in the tables that are for all GPUs of the architecture; ``UsageError`` if there are none."""
    tables = [Table.read(path) for path in folder.glob(f"*/{FOLDER}/{general(arch)}")]
    texts = dict.fromkeys(
        (table.family, result.problem.rpartition(" ")[0])
        for table in tables
        for result in table.measured
    )
    if not texts:
        raise UsageError(f"--known: no table in {folder} is for {arch}")
    return [operators()[name].benchmark.parse(text) for name, text in texts]


def installed(target: Target, only: Callable[[Variant], bool]) -> Callable[[Variant], bool]:
    """Of what is wanted, the variants that archives for a target hold."""
    variants = {binary.variant for archive, binary in catalogue() if archive.arch == target}
    return lambda variant: variant in variants and only(variant)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_choice(parser)
    parser.add_argument("--device", metavar="cuda:N", help="default: the first GPU")
    parser.add_argument(
        "--folder", type=Path, default=FAMILIES, help="where the families' tables are"
    )
    parser.add_argument(
        "--known",
        action="store_true",
        help="in place of --shapes and --dtype: what is in the architecture's table",
    )
    parser.add_argument(
        "--installed",
        action="store_true",
        help="time no variant that is not installed, so that wheels hold no more than they do",
    )
    args = parser.parse_args()
    try:
        if args.known and (args.shapes or args.dtype):
            raise UsageError("--known names the problems; accepted without --shapes and --dtype")
        tuner = tuner_for(args.device, args.budget)
        problems = chosen(args, known(args.folder, tuner.device.arch) if args.known else None)
        only = wanted(args.only, problems)
        if args.installed:
            only = installed(Target(tuner.device.capability), only)
        tuner.only = only
    except UsageError as error:
        print(f"tools/tune.py: error: {error}", file=sys.stderr)
        return 2

    def keep() -> list[Path]:
        return save(args.folder, tuner.device.arch, tuner.tuned, only)

    tuner.keep = keep
    watched(tuner, problems)
    if not tuner.tuned:
        print("tools/tune.py: error: nothing was timed", file=sys.stderr)
        return 2
    show_report(tuner)
    for path in keep():
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
