"""Compare the times of two builds of this package on one GPU, interleaved.

    pip install --no-deps --target OLD old.whl; pip install --no-deps --target NEW new.whl
    python tools/compare.py OLD NEW [--rounds 2] [--json FILE] -- bench --case time_last:8,1536,2048:float32

What follows ``--`` are arguments of ``scan-registry``. Each round runs them with the old build and then with the new
one, each in a process of its own. Of each case, pass and backend the shortest median of a build counts. A ratio is the
new build's time over the old one's: above 1, the new build is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from records import write_records


@dataclass
class Row:
    """The times of one case, pass and backend by both builds, in ms, one for each round."""

    case: dict[str, Any]
    direction: str
    who: str
    old_ms: list[float] = field(default_factory=list)
    new_ms: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return min(self.new_ms) / min(self.old_ms)


def timings(folder: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """What ``scan-registry``, installed in ``folder``, measures; ``SystemExit`` with its errors if it fails."""
    command = [sys.executable, "-m", "scan_registry", *words, "--json"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(folder.resolve())},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    try:
        rows: list[dict[str, Any]] = json.loads(done.stdout)["timings"]
    except (ValueError, KeyError):
        raise SystemExit(
            f"{folder}: {' '.join(words)} printed no timings:\n{done.stderr}"
        ) from None
    return rows


def compare(old: Path, new: Path, words: Sequence[str], rounds: int) -> list[Row]:
    """A row for whatever both builds time."""
    rows: dict[tuple[str, str, str], Row] = {}
    for _ in range(rounds):
        for build, folder in (("old_ms", old), ("new_ms", new)):
            for timing in timings(folder, words):
                case = timing.get("case") or timing["network"]
                key = json.dumps(case, sort_keys=True), timing["direction"], timing["who"]
                row = rows.setdefault(key, Row(case, timing["direction"], timing["who"]))
                getattr(row, build).append(timing["ms"])
    return [row for row in rows.values() if row.old_ms and row.new_ms]


def show(rows: Sequence[Row]) -> None:
    """A line for each pass and backend: the geometric mean of the ratios, and the largest with its case."""
    for direction, who in dict.fromkeys((row.direction, row.who) for row in rows):
        group = [row for row in rows if (row.direction, row.who) == (direction, who)]
        worst = max(group, key=lambda row: row.ratio)
        mean = geometric_mean(row.ratio for row in group)
        case = ", ".join(map(str, worst.case.values()))
        print(
            f"{direction}, {who}: {mean:.3f} in the mean of {len(group)}, {worst.ratio:.3f} for {case}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="folder that the old build is installed in")
    parser.add_argument("new", type=Path, help="folder that the new build is installed in")
    parser.add_argument("--rounds", type=int, default=2, help="times that each build runs (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time to FILE")
    parser.add_argument("words", nargs="+", metavar="-- bench …", help="of scan-registry")
    options = parser.parse_args()
    rows = compare(options.old, options.new, options.words, options.rounds)
    if not rows:
        print("the builds have no case in common", file=sys.stderr)
        return 1
    if options.json:
        write_records(options.json, {"words": options.words, "rows": [asdict(row) for row in rows]})
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
