"""Run every kernel of a family on a few small problems, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --kernel-name kns=FAMILY --error-exitcode 1 python tools/sanitize.py FAMILY
    compute-sanitizer --tool racecheck --kernel-name kns=ward --error-exitcode 1 python tools/sanitize.py rnn

and likewise with ``--tool synccheck`` and ``initcheck``. memcheck and initcheck find more with
PYTORCH_NO_CUDA_MEMORY_CACHING=1. ``kns=`` selects kernels by a part of their names: those of ``rnn`` end with forward or
backward, those of other families begin with the family's name. ``--only`` selects a part of the binaries.

Every installed binary for exactly this GPU is launched on each problem of ``SMALL`` in ``kernels/<family>/cases.py`` that it
takes. Errors are compared with the tolerances, too. The exit status is 1 if an error is over its tolerance, or if a binary
takes none of the problems.
"""

from __future__ import annotations

import argparse
import re
import sys
import time

from attest import errors_of, runnable

from scan_registry.dispatch.fit import Tier, nearest_tier
from scan_registry.kernels import families
from scan_registry.kernels.model import Family


def sanitize(family: Family, only: str) -> int:
    """The exit status, after a launch of each binary in whose name ``only`` is found on each problem that it takes."""
    from scan_registry.diagnostics.accuracy import cases_of
    from scan_registry.hardware.device import device

    began, gpu, cases = time.monotonic(), device(0), cases_of(family.name)
    binaries = [
        (archive, binary)
        for archive, binary in runnable(family)
        if nearest_tier(archive.arch, gpu) == Tier.EXACT and re.search(only, str(binary.variant))
    ]
    counts = {str(binary): 0 for _, binary in binaries}
    wrong = 0
    for dtype, tolerance in cases.TOLERANCE.items():
        of_dtype = [pair for pair in binaries if pair[1].variant.text("dtype") == dtype]
        for trial in cases.trials(dtype, cases.SMALL, "cuda") if of_dtype else ():
            for binary, error in errors_of(family, of_dtype, trial, gpu.sm_count):
                counts[str(binary)] += 1
                if not error <= tolerance:
                    wrong += 1
                    print(f"error: {binary} {trial}: {error:.1e}", file=sys.stderr)
    idle = [f"error: {name} took no problem\n" for name, count in counts.items() if not count]
    sys.stderr.writelines(idle)
    total, seconds = sum(counts.values()), time.monotonic() - began
    print(f"{len(counts)} binaries, {total} launches, {wrong} wrong, {seconds:.0f} s")
    return int(wrong + len(idle) > 0 or not binaries)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=families())
    parser.add_argument("--only", default="", metavar="REGEX", help="binaries in whose name it is")
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        print("error: sanitize runs kernels, and torch finds no GPU", file=sys.stderr)
        return 2
    return sanitize(families()[options.family], options.only)


if __name__ == "__main__":
    sys.exit(main())
