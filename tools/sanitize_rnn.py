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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sanitize import launch, takes

from scan_registry.kernels.model import Variant
from scan_registry.kernels.rnn.cases import SETTINGS, TOLERANCE, Setting, Shape, draw
from scan_registry.kernels.rnn.problem import SIZES, Function

__all__ = ["POSED", "TOGETHER", "main", "takes"]

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


def trials(functions: Sequence[Function], dtypes: Sequence[str]) -> Iterator[tuple[Posed, Any]]:
    """Every problem of every cell in every dtype, drawn and solved."""
    for dtype in dtypes:
        for function in functions:
            for posed in POSED:
                yield posed, draw(function, posed.shape, posed.setting, dtype, "cuda")


def launches(posed_trial: tuple[Posed, Any], variant: Variant) -> Iterator[Any]:
    """The one of its function and dtype."""
    posed, trial = posed_trial
    if (variant.text("dtype"), variant.text("function")) == (trial.dtype, trial.function):
        yield trial.case(variant.kernel, aligned=posed.aligned)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", action="append", choices=TOLERANCE, help="may repeat")
    parser.add_argument("--function", action="append", choices=SIZES, help="may repeat")
    options = parser.parse_args()

    dtypes = options.dtype or [*TOLERANCE]
    functions = options.function or [*SIZES]

    def chosen(variant: Variant) -> bool:
        return variant.text("dtype") in dtypes and variant.text("function") in functions

    return launch("rnn", trials(functions, dtypes), launches, TOLERANCE, chosen)


if __name__ == "__main__":
    sys.exit(main())
