"""The description of a gated scan by which a kernel is selected and launched. It has sizes and strides, but no tensors.

Tensors, P being the channel parameters of a kind and S the sequences that are packed along time:

    input0 … input3, states, states_grad    (B, C, T), of unit stride along time or along channels; inputs share their
    input0_grad … input3_grad               strides, and so do their gradients. Null: the kind has no such input, or
                                            its gradient is not wanted
    parameters                              (P, C), float32, without gaps; null if P is 0
    parameters_grad                         (parts, P, C), float32, without gaps: partial sums, which the operator adds
                                            up. Every part is written. Null: not wanted
    reset                                   (B, T), a byte each, of unit stride along time: not 0 where the state starts
                                            anew; null: nowhere
    initial_state, final_state              (B, C), or (B, C, S) in any order, float32; null: zeros, or not wanted
    final_state_grad, initial_state_grad    likewise, of the strides of ``state``
    offsets                                 (S + 1,), int64; null if no sequences are packed

``GatedScanProblem`` inherits from the problem of linear_scan, whose rules for tiles and memory it shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.linear_scan.problem import (
    LinearScanProblem,
    Strides,
    ceil_div,
)

__all__ = ["GatedScanProblem", "Strides", "ceil_div"]

Direction = Literal["forward", "backward"]
Layout = Literal["time_last", "channel_last"]

#: What kernels are built for.
DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
LAYOUTS: tuple[Layout, ...] = ("time_last", "channel_last")
#: The most inputs of a kind.
MOST_INPUTS = 4
#: The kinds without option, by the name of their header.
HEADERS = {kind.source: kind for kind in KINDS.values() if not kind.option}
#: A partial sum is over at least so many time steps, except for at most ``_LAST_PARTS`` parts of each batch.
LEAST_PART = 32
_LAST_PARTS = 8

_INPUTS = tuple(f"input{n}" for n in range(MOST_INPUTS))
#: The pointers of each direction, in the kernels' order.
POINTERS: Mapping[Direction, tuple[str, ...]] = {
    "forward": (
        *_INPUTS,
        *("parameters", "reset", "initial_state", "states", "final_state", "offsets", "workspace"),
    ),
    "backward": (
        *_INPUTS,
        *("parameters", "reset", "states", "states_grad", "initial_state", "final_state_grad"),
        *(f"{name}_grad" for name in _INPUTS),
        *("parameters_grad", "initial_state_grad", "offsets", "workspace"),
    ),
}
#: The tensors that have strides of their own, in the kernels' order: ``grads`` are those of the inputs, ``state`` are
#: the states before and after the scan and their gradients.
STRIDED: Mapping[Direction, tuple[str, ...]] = {
    "forward": ("inputs", "states", "state"),
    "backward": ("inputs", "states", "states_grad", "grads", "state"),
}


def integers(direction: Direction) -> tuple[str, ...]:
    """The names of the integer parameters of each direction, in the kernels' order."""
    strides = (
        f"{tensor}_{dimension}"
        for tensor in STRIDED[direction]
        for dimension in ("batch", "channel", "time")
    )
    sizes = ("batch", "channels", "time", "sequences")
    parts = ("parts",) if direction == "backward" else ()
    return (*sizes, *strides, "reset_batch", *parts, "flags")


@dataclass(frozen=True)
class GatedScanProblem(LinearScanProblem):
    """One direction of one gated scan.

    direction    forward or backward
    dtype        dtype of the inputs, the states and their gradients. The states before and after the scan, the channel
                 parameters and the gradients of these are float32
    kind         the name of the kind's header
    option       the value of ``option`` in the header
    resets       whether there is a ``reset``
    reset_batch  the stride between batches of ``reset``
    """

    kind: str = "linear"
    option: bool = False
    resets: bool = False
    reset_batch: int = 0

    @property
    def inputs(self) -> int:
        """How many inputs the kind has."""
        return len(HEADERS[self.kind].inputs)

    @property
    def parameters(self) -> int:
        """How many channel parameters the kind has."""
        return len(HEADERS[self.kind].parameters)

    @property
    def parts(self) -> int:
        """How many partial sums of channel parameters' gradients there are if each is over a whole sequence."""
        return self.batch * max(1, self.sequences)

    @property
    def most_parts(self) -> int:
        """The most partial sums that a launch writes."""
        return self.parts + self.batch * (self.time // LEAST_PART + _LAST_PARTS)

    def scalars(self, rows: int = 0, parts: int = 0) -> dict[str, int]:
        """Every integer parameter of the kernels, by name. ``parts`` is how many partial sums the launch writes, 0 for
        ``self.parts``. ``rows`` is the value of ``flags`` from bit 2 on."""
        changed = {"flags": self._scalars["flags"] + 4 * rows}
        if parts and self.direction == "backward":
            changed["parts"] = parts
        return {**self._scalars, **changed}

    @cached_property
    def _scalars(self) -> dict[str, int]:
        sizes = ("batch", "channels", "time", "sequences", "reset_batch")
        values = {name: getattr(self, name) for name in sizes}
        values["flags"] = int(self.reverse) + 2 * int(self.option)
        if self.direction == "backward":
            values["parts"] = self.parts
        for name, strides in zip(self._strided, self.strides, strict=True):
            for dimension in ("batch", "channel", "time"):
                values[f"{name}_{dimension}"] = getattr(strides, dimension)
        return values

    @property
    def _strided(self) -> tuple[str, ...]:
        return STRIDED["backward" if self.direction == "backward" else "forward"]

    def strides_of(self, tensor: str) -> Strides:
        """The strides of one of the tensors that ``STRIDED`` names."""
        return self.strides[self._strided.index(tensor)]

    def has_one_gate(self) -> bool:
        """False: gates differ from step to step."""
        return False
