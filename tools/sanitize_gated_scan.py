"""Run every kernel of gated scans on few small problems, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --kernel-name kns=gated_scan --error-exitcode 1 \\
        python tools/sanitize_gated_scan.py

and likewise ``--tool racecheck``, ``synccheck`` and ``initcheck``; memcheck and initcheck see more with
PYTORCH_NO_CUDA_MEMORY_CACHING=1. ``--dtype`` and ``--kind`` take a part.

Every installed binary for exactly this GPU is launched, with every option and with none, on sequences whose last tile
is not full, in memory with gaps and without, and on packed sequences. Errors are compared with the tolerances, too. The
exit status is 1 if one is over its limit or a binary took no problem.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from sanitize import launch

from scan_registry.kernels.gated_scan.cases import TOLERANCE, Setting, Shape, Trial, draw
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.model import Variant

NOTHING = Setting()
EVERYTHING = Setting(states=True, reverse=True, resets=True)
PACKED = Setting(states=True, packed=True, resets=True)
#: Columns and rows that are not full, and several tiles; and rows of whole pieces.
POSED: tuple[tuple[Shape, Setting], ...] = (
    ((2, 72, 264), EVERYTHING),
    ((1, 72, 264), NOTHING),
    ((2, 5, 133), PACKED),
)


def trials(kinds: Sequence[str], dtypes: Sequence[str]) -> Iterator[Trial]:
    """Every problem of every kind in every dtype, drawn and solved."""
    for dtype in dtypes:
        for kind in kinds:
            for shape, setting in POSED:
                yield draw(shape, kind, setting, dtype, "cuda")


def launches(trial: Trial, variant: Variant) -> Iterator[Any]:
    """Of variants of the trial's kind and dtype."""
    if (variant.text("kind"), variant.text("dtype")) == (KINDS[trial.kind].source, trial.dtype):
        yield from trial.launches(variant.kernel)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", action="append", choices=TOLERANCE, help="may repeat")
    parser.add_argument("--kind", action="append", choices=KINDS, help="may repeat")
    options = parser.parse_args()
    kinds, dtypes = options.kind or [*KINDS], options.dtype or [*TOLERANCE]
    sources = {KINDS[kind].source for kind in kinds}

    def chosen(variant: Variant) -> bool:
        return variant.text("kind") in sources and variant.text("dtype") in dtypes

    return launch("gated_scan", trials(kinds, dtypes), launches, TOLERANCE, chosen)


if __name__ == "__main__":
    sys.exit(main())
