"""Random problems; ``selftest`` and ``tools/attest.py`` run kernels on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scan_registry.kernels.cases import Case
from scan_registry.kernels.scale import reference
from scan_registry.kernels.scale.spec import ScaleProblem

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as GPU-tested.
TOLERANCE = {"float32": 1e-6}

#: Sizes: less than a block, and a remainder.
QUICK = (1, 1000)
SMALL = QUICK
THOROUGH = (1, 255, 256, 257, 100_003)


@dataclass(frozen=True)
class Trial:
    """Inputs of one problem."""

    problem: ScaleProblem
    x: Tensor

    def __str__(self) -> str:
        return str(self.problem)

    def launches(self, kernel: str) -> Iterator[Case]:
        """All that computes this: one."""
        yield self.case(kernel, aligned=True)

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch that computes this, whose output is poisoned."""
        expected = reference.forward(self.x.double(), self.problem.factor)
        tensors: dict[str, Tensor | None] = {"x": self.x, "y": torch.full_like(self.x, torch.nan)}
        return Case(self.problem, tensors, {"y": expected})


def trials(dtype: str, shapes: tuple[int, ...], device: torch.device | str) -> Iterator[Trial]:
    """One for each size."""
    for size in shapes:
        x = torch.randn(size, dtype=getattr(torch, dtype)).to(device)
        yield Trial(ScaleProblem(dtype, size, factor=3), x)
