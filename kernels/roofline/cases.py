"""Random problems for the stream kernels; ``selftest`` and ``tools/attest.py`` run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scan_registry.kernels.cases import Case
from scan_registry.kernels.roofline import reference
from scan_registry.kernels.roofline.spec import PATTERNS, RooflineProblem

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as GPU-tested.
TOLERANCE = {"float32": 1e-6}

#: Floats of a tensor: less than a vector, less and more than a block's share, and a remainder of every
#: size.
QUICK = (3, 4097, 100_000)
SMALL = QUICK
THOROUGH = (1, 4, 255, 1024, 4095, 4097, 16_386, 1_000_003, 20_000_000)


@dataclass(frozen=True)
class Trial:
    """Inputs of one problem."""

    problem: RooflineProblem
    inputs: tuple[Tensor, ...]

    def __str__(self) -> str:
        return str(self.problem)

    def launches(self, kernel: str) -> Iterator[Case]:
        """All that computes this: one."""
        yield self.case(kernel, aligned=True)

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch that computes this. There is one kernel, and its tensors are always aligned."""
        wide = reference.forward([x.double() for x in self.inputs])
        expected = dict(zip(self.problem.outputs, wide, strict=False))
        tensors: dict[str, Tensor | None] = dict(zip(self.problem.inputs, self.inputs, strict=True))
        tensors |= {
            name: torch.full_like(self.inputs[0], torch.nan) for name in self.problem.outputs
        }
        return Case(self.problem, tensors, expected)


def trials(dtype: str, shapes: tuple[int, ...], device: torch.device | str) -> Iterator[Trial]:
    """One for each size and pattern."""
    for count in shapes:
        for reads, writes in PATTERNS:
            inputs = [torch.randn(count, dtype=getattr(torch, dtype)) for _ in range(reads)]
            yield Trial(RooflineProblem(reads, writes, count), tuple(x.to(device) for x in inputs))
