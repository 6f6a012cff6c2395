"""The designs of the CUDA kernels for forward and backward scans: which module says what a variant accepts and how it launches.

A module is a design if it has the functions of ``Design``, which are all that selection and tuning ask of it.
"""

from __future__ import annotations

from typing import Protocol

from scan_registry.kernels.linear_scan import (
    constant_gate,
    multi_cta,
    narrow,
    one_gate,
    registers,
    resident,
    scalar,
    short_rows,
    streams,
)
from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem
from scan_registry.kernels.linear_scan.space import (
    CONSTANT_GATE,
    MULTI_CTA,
    NARROW,
    ONE_GATE,
    RESIDENT,
    SCALAR,
    SHORT,
)
from scan_registry.kernels.model import Launch, Variant


class Design(Protocol):
    def accepts(self, variant: Variant, problem: LinearScanProblem) -> str | None:
        """Why the variant does not solve a problem of its dtypes, direction of time and number of sequences."""

    def times(self, variant: Variant) -> int:
        """Time steps that a tile covers."""

    def cost(self, variant: Variant, problem: LinearScanProblem) -> float:
        """The preference without tuning: smaller is better."""

    def launch(self, variant: Variant, problem: LinearScanProblem, sm_count: int) -> Launch:
        """The grid, the integer parameters, and the workspace."""

    def sums(self, variant: Variant) -> bool:
        """Whether a backward variant can sum the gradient of gates over time."""

    def shared(self, direction: Direction, variant: Variant) -> int:
        """Bytes of dynamic shared memory of a CTA."""


_OF_ACCESS: dict[str, Design] = {
    MULTI_CTA: multi_cta,
    NARROW: narrow,
    CONSTANT_GATE: constant_gate,
    ONE_GATE: one_gate,
    RESIDENT: resident,
    SCALAR: scalar,
    SHORT: short_rows,
}


def design_of(variant: Variant) -> Design:
    design = _OF_ACCESS.get(variant.text("access"))
    if design is not None:
        return design
    return streams if streams.is_streamed(variant) else registers
