"""Run every kernel of selective scans on few small problems, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --kernel-name kns=selective_scan --error-exitcode 1 \\
        python tools/sanitize_selective_scan.py

and likewise ``--tool racecheck``, ``synccheck`` and ``initcheck``; memcheck and initcheck see more with
PYTORCH_NO_CUDA_MEMORY_CACHING=1. ``--dtype`` takes a part.

Every installed binary for exactly this GPU is launched, with every option and with none, on sequences whose last tile
is not full, in memory with gaps and without, in one part and in several, and on few states and on many.
Errors are compared with the tolerances, too. The exit status is 1 if one is over its limit or a binary took no problem.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from sanitize import launch

from scan_registry.kernels.model import Variant
from scan_registry.kernels.selective_scan.cases import TOLERANCE, Setting, Shape, Trial, draw

EVERYTHING = Setting(starts=True)
NOTHING = Setting(gated=False, softplus=False)
PACKED = Setting(starts=True, packed=True, groups=2)
CHANNEL_LAST = Setting(starts=True, layout="channel_last")
#: One block of states, several, and many.
POSED: tuple[tuple[Shape, Setting], ...] = (
    *(((2, 24, 40, 16), setting) for setting in (EVERYTHING, NOTHING, PACKED, CHANNEL_LAST)),
    *(((1, 24, 40, 50), setting) for setting in (EVERYTHING, CHANNEL_LAST)),
    *(((1, 8, 24, 200), setting) for setting in (EVERYTHING, CHANNEL_LAST)),
)


def trials(dtypes: Sequence[str]) -> Iterator[Trial]:
    """Every problem in every dtype, drawn and solved."""
    for dtype in dtypes:
        for shape, setting in POSED:
            yield draw(shape, setting, dtype, "cuda")


def launches(trial: Trial, variant: Variant) -> Iterator[Any]:
    """All that there may be."""
    yield from trial.launches(variant.kernel)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", action="append", choices=TOLERANCE, help="may repeat")
    options = parser.parse_args()

    dtypes = options.dtype or [*TOLERANCE]

    def chosen(variant: Variant) -> bool:
        return variant.text("dtype") in dtypes

    return launch("selective_scan", trials(dtypes), launches, TOLERANCE, chosen)


if __name__ == "__main__":
    sys.exit(main())
