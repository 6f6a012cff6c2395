"""Run every kernel of recurrent networks on few small problems, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --kernel-name kns=ward --error-exitcode 1 \\
        python tools/sanitize_rnn.py

and likewise ``--tool racecheck``, ``synccheck`` and ``initcheck``; memcheck and initcheck see more with
PYTORCH_NO_CUDA_MEMORY_CACHING=1. The names of all these kernels, and of none of torch's that run here, end
with forward or backward. ``--dtype`` and ``--function`` take a part.

Every installed binary for exactly this GPU is launched: on heads that a block has for itself, once with
nothing that may be left out and no gaps, and once with everything and gaps between rows; and, as far as it
takes them, on wider heads whose blocks wait for each other, over more steps than their ring has room for, and
on still wider ones, for which they wait several times in a step. The last tile of batches is not full. Errors are compared with the tolerances, too. Without
compute-sanitizer this takes seconds. The exit status is 1 if an error is over its limit or a binary took no
problem.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from attest import runnable

from scan_registry.dispatch.fit import Tier, nearest_tier
from scan_registry.kernels import family
from scan_registry.kernels.model import Kernel, Problem, Variant
from scan_registry.kernels.rnn.cases import SETTINGS, TOLERANCE, Setting, Shape, draw
from scan_registry.kernels.rnn.problem import SIZES, Function

#: (batch, time, heads, units)
ALONE: Shape = (9, 5, 2, 64)
#: Of Triton's float32 kernels, which have room for half as many units.
NARROW: Shape = (9, 5, 2, 32)
#: Of which every kernel for several blocks has at least two.
TOGETHER: Shape = (9, 35, 1, 128)
#: Whose blocks wait several times in a step, in float32 and in 16 bits.
WIDE: Shape = (9, 5, 1, 640)
WIDEST: Shape = (2, 2, 1, 1280)


@dataclass(frozen=True)
class Posed:
    """A problem for all kernels of a function."""

    shape: Shape
    setting: Setting
    aligned: bool


NOTHING, EVERYTHING = SETTINGS[0], SETTINGS[3]
POSED = (
    Posed(ALONE, NOTHING, aligned=True),
    Posed(ALONE, EVERYTHING, aligned=False),
    Posed(NARROW, EVERYTHING, aligned=False),
    Posed(TOGETHER, EVERYTHING, aligned=False),
    Posed(WIDE, EVERYTHING, aligned=False),
    Posed(WIDEST, EVERYTHING, aligned=False),
)


def takes(kernel: Kernel, variant: Variant, problem: Problem, sm_count: int) -> bool:
    """Whether a variant computes a problem on such a GPU."""
    return not (
        kernel.rules.accepts(variant, problem)
        or kernel.rules.exceeds_residency(variant, problem, sm_count)
    )


def trials(functions: Sequence[Function], dtypes: Sequence[str]) -> Iterator[tuple[Posed, Any]]:
    """Every problem of every cell in every dtype, drawn and solved."""
    for dtype in dtypes:
        for function in functions:
            for posed in POSED:
                yield posed, draw(function, posed.shape, posed.setting, dtype, "cuda")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", action="append", choices=TOLERANCE, help="may repeat")
    parser.add_argument("--function", action="append", choices=SIZES, help="may repeat")
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        print("error: sanitize_rnn runs kernels, and torch finds no GPU", file=sys.stderr)
        return 2
    from scan_registry.diagnostics.accuracy import run
    from scan_registry.hardware.device import device

    began, gpu, group = time.monotonic(), device(0), family("rnn")
    dtypes = options.dtype or [*TOLERANCE]
    functions = options.function or [*SIZES]
    binaries = [
        (archive, binary)
        for archive, binary in runnable(group)
        if nearest_tier(archive.arch, gpu) == Tier.EXACT
        and binary.variant.text("dtype") in dtypes
        and binary.variant.text("function") in functions
    ]
    launches = dict.fromkeys((str(binary) for _, binary in binaries), 0)
    wrong = 0
    for posed, trial in trials(functions, dtypes):
        for archive, binary in binaries:
            variant = binary.variant
            if (variant.text("dtype"), variant.text("function")) != (trial.dtype, trial.function):
                continue
            kernel = group.kernel(variant.kernel, variant.language)
            case = trial.case(variant.kernel, aligned=posed.aligned)
            if not takes(kernel, variant, case.problem, gpu.sm_count):
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
