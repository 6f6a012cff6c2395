"""How many variants wheels hold, and what that costs, by the tuning tables.

    python tools/variants.py

Of each architecture's archive the number of variants; and of each table how many times as long as the fastest of all
variants the fastest takes that an archive holds, in the geometric mean of its rows and at worst. Of architectures that
have no table, that is by the nearest one's times, of the variants that they have room for. Compiles nothing; needs the
sources installed, such as by ``pip install -e . -C archs=none``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from scan_registry.aot.plan import chosen_archs, plan
from scan_registry.hardware.target import Target
from scan_registry.kernels import families
from scan_registry.kernels.model import Kernel


def losses(kernel: Kernel, arch: Target, held: set[str]) -> Iterator[tuple[str, float]]:
    """GPU and, for each row, the time of the fastest variant held over that of the fastest of all."""
    every = {kernel.label(v) for v in kernel.every if kernel.rules.serves(v.statics, arch)}
    for tuning in kernel.tunable.timings():
        if tuning.exclusive and tuning.capability != arch.capability:
            continue
        for kind in tuning.kinds:
            for row in tuning.rows(kind):
                times = {label: ms for label, ms in row.times.items() if label in every}
                there = [ms for label, ms in times.items() if label in held]
                if there:  # else something else serves it, which nobody has timed
                    yield tuning.gpu, min(there) / min(times.values())


def main() -> int:
    total = 0
    for arch, jobs in plan(chosen_archs({"archs": "all"})).items():
        held = {str(job.variant) for job in jobs}
        total += len(held)
        found: dict[str, list[float]] = {}
        for kernel in (k for family in families().values() for k in family.kernels):
            labels = {kernel.label(v) for v in kernel.every if str(v) in held}
            for gpu, ratio in losses(kernel, arch, labels):
                found.setdefault(gpu, []).append(ratio)
        print(f"{arch.label}: {len(held)} variants")
        for gpu, ratios in found.items():
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            rows = f"{len(ratios)} rows of {gpu}"
            print(f"    {mean:.4f} times the fastest's time, at worst {max(ratios):.3f}: {rows}")
    print(f"together: {total} variants")
    return 0


if __name__ == "__main__":
    sys.exit(main())
