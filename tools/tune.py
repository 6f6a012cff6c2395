"""Tune the kernels on this GPU, and record every timing beside their specs.

    python tools/tune.py                         every kernel, dtype and shape that is usual
    python tools/tune.py --language cuda --dtype bf16 --budget 400
    python tools/tune.py --shapes time_last:8,1536,4096 --kernel time_last_forward

It writes ``kernels/<family>/tuning/<arch>.json`` after every kernel and kind, so that nothing is lost
where a machine goes away; problems that are in the file already are replaced, others stay. The next wheel
holds what the file names, and its archives the rows. Last it says how far the installed choices were
from the best.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scan_registry.cli.errors import UsageError
from scan_registry.cli.tune import add_choice, chosen, show_report, tuner_for, watched
from scan_registry.kernels.tables import FOLDER, Table, forget_reduced
from scan_registry.tuner.engine import Tuned

ROOT = Path(__file__).parents[1]


def save(folder: Path, arch: str, tuned: list[Tuned]) -> list[Path]:
    """Add what was measured to the families' tables in ``folder``; return the files."""
    written = []
    for name in dict.fromkeys(each.posed.family.name for each in tuned):
        path = folder / name / FOLDER / f"{arch.replace('_', '')}.json"
        table = Table.read(path) if path.exists() else Table(name, arch)
        newer = [each.measured for each in tuned if each.posed.family.name == name]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(table.with_newer(newer).text())
        forget_reduced(folder / name)
        partial.replace(path)
        written.append(path)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_choice(parser)
    parser.add_argument("--device", metavar="cuda:N", help="default: the first GPU")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "kernels", help="where the families' tables are"
    )
    args = parser.parse_args()
    try:
        problems = chosen(args)
        tuner = tuner_for(args.device, args.budget)
    except UsageError as error:
        print(f"tools/tune.py: error: {error}", file=sys.stderr)
        return 2
    tuner.keep = lambda: save(args.folder, tuner.device.arch, tuner.tuned)
    watched(tuner, problems)
    if not tuner.tuned:
        print("tools/tune.py: error: nothing was timed", file=sys.stderr)
        return 2
    show_report(tuner)
    for path in save(args.folder, tuner.device.arch, tuner.tuned):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
