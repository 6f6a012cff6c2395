"""Random pools and rows; ``selftest`` and ``tools/attest.py`` run the kernel on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scan_registry.kernels.cases import Case
from scan_registry.kernels.state_rows import reference
from scan_registry.kernels.state_rows.spec import UNITS, RowsProblem

#: Bytes are copied as they are.
TOLERANCE = {"float32": 1e-12}

#: (slots, rows, runs of a row, floats of a run): runs of whole units, of parts of one, and rows of several CTAs.
Shape = tuple[int, int, int, int]
QUICK: tuple[Shape, ...] = ((5, 3, 1, 8), (7, 6, 3, 4), (9, 4, 5, 3), (4, 3, 1, 2500))
SMALL = QUICK
THOROUGH: tuple[Shape, ...] = (
    *QUICK,
    *((1, 1, 1, 1), (80, 64, 8192, 3), (80, 64, 1, 131072), (300, 257, 24, 64)),
)


@dataclass(frozen=True)
class Trial:
    """A pool whose runs have gaps between them if there are several, or whose runs' floats have; states; and the slots of these."""

    shape: Shape
    scatter: bool
    wide_indices: bool
    pool: Tensor
    states: Tensor
    indices: Tensor

    def __str__(self) -> str:
        return f"{self.shape} {'scatter' if self.scatter else 'gather'}"

    def launches(self, kernel: str) -> Iterator[Case]:
        """In units of every size that divides all distances, or of one float if floats do not lie together."""
        *distances, stride = self.pool.stride()
        for unit in UNITS if stride == 1 else (4,):
            if all(4 * number % unit == 0 for number in (self.shape[3], *distances)):
                yield self._case(unit)

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch in the largest units, or in the smallest."""
        every = list(self.launches(kernel))
        return every[0 if aligned else -1]

    def _case(self, unit: int) -> Case:
        slots, rows, runs, run = self.shape
        slot_stride, run_stride, stride = self.pool.stride()
        pad = int(self.indices[-1])
        problem = RowsProblem(
            rows=rows,
            units=runs * run * 4 // unit,
            unit=unit,
            run=run * 4 // unit,
            stride=stride,
            run_stride=run_stride * 4 // unit,
            slots=slots,
            slot_stride=slot_stride * 4 // unit,
            scatter=self.scatter,
            pad_slot=pad,
            wide_indices=self.wide_indices,
        )
        pool = torch.empty_strided(self.pool.shape, self.pool.stride(), device=self.pool.device)
        pool.copy_(self.pool)
        tensors: dict[str, Tensor | None] = {
            "pool": pool,
            "states": self.states.clone()
            if self.scatter
            else torch.full_like(self.states, torch.nan),
            "indices": self.indices,
        }
        by_hand = self.pool.double(), self.indices
        if self.scatter:
            after = reference.scatter(by_hand[0], self.states.double(), by_hand[1], pad)
            return Case(problem, tensors, {"pool": after})
        return Case(problem, tensors, {"states": reference.gather(*by_hand, pad)})


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """A gather and a scatter of each shape, with an index that is too large, one below zero and one of ``pad_slot``."""
    for number, (slots, rows, runs, run) in enumerate(shapes):
        for scatter in (False, True):
            whole = torch.randn(
                slots, runs, run + (4 if runs > 1 else 0), dtype=getattr(torch, dtype)
            )
            wide = number % 2 == int(scatter)
            indices = torch.randperm(slots + 1)[:rows].to(torch.int64 if wide else torch.int32)
            indices[0] = -1 if rows > 3 else indices[0]
            yield Trial(
                (slots, rows, runs, run),
                scatter,
                wide,
                whole.to(device)[..., :run],
                torch.randn(rows, runs, run, dtype=whole.dtype).to(device),
                indices.to(device),
            )
