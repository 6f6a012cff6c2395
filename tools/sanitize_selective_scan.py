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
import time
from collections.abc import Iterator, Sequence
from functools import partial

from attest import runnable

from scan_registry.dispatch.fit import Tier, nearest_tier
from scan_registry.kernels import family
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", action="append", choices=TOLERANCE, help="may repeat")
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        print(
            "error: sanitize_selective_scan runs kernels, and torch finds no GPU", file=sys.stderr
        )
        return 2
    from scan_registry.diagnostics.accuracy import run
    from scan_registry.hardware.device import device

    began, gpu, group = time.monotonic(), device(0), family("selective_scan")
    dtypes = options.dtype or [*TOLERANCE]
    binaries = [
        (archive, binary)
        for archive, binary in runnable(group)
        if nearest_tier(archive.arch, gpu) == Tier.EXACT and binary.variant.text("dtype") in dtypes
    ]
    launches = dict.fromkeys((str(binary) for _, binary in binaries), 0)
    wrong = 0
    for trial in trials(dtypes):
        for archive, binary in binaries:
            variant = binary.variant
            kernel = group.kernel(variant.kernel, variant.language)
            for case in trial.launches(variant.kernel):
                if kernel.rules.accepts(variant, case.problem):
                    continue
                run(0, binary, partial(archive.read, binary), case)
                launches[str(binary)] += 1
                if not (error := case.error()) <= TOLERANCE[trial.dtype]:
                    wrong += 1
                    print(f"error: {binary} {trial}: {error:.1e}", file=sys.stderr)
    idle = [name for name, count in launches.items() if not count]
    for name in idle:
        print(f"error: {name} took no problem", file=sys.stderr)
    total, seconds = sum(launches.values()), time.monotonic() - began
    print(f"{len(launches)} binaries, {total} launches, {wrong} wrong, {seconds:.0f} s")
    return 1 if wrong or idle or not binaries else 0


if __name__ == "__main__":
    sys.exit(main())
