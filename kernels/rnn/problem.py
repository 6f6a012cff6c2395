"""A recurrent network as numbers: what selection and launching need to know, and no tensor.

Tensors, N being heads and D hidden units of a head; ``Sizes`` has the counts of gates and states:

    inputs        (B, T, inputs, N, D)      the input's share of each gate, Wx
    recurrent     (recurrent, N, D, D)      R; the last two are the new and the previous unit
    bias          (bias, N, D)
    initial       (states, B, N, D)         before the first step; null: zeros
    reset         (B, T), a byte each       not 0: states start from zeros at this step; null: nowhere
    states        (states, B, T, N, D)      after each step; h comes first
    cache         (B, T, cache, N, D)       what the backward pass needs beside the states
    states_grad   (graded, B, T, N, D)      of all states, or of h alone
    final_grad    (states, B, N, D)         comes on top of the last step's; null: zeros
    gates_grad    (B, T, bias, N, D)        of every pre-activation, in the order of the bias
    initial_grad  (states, B, N, D)

The gates that ``recurrent`` feeds are the first of those, and the gates that ``inputs`` feeds the last.
Each (gates, N, D) block and each (N, D) block is without gaps; between batches, times and states there
are strides.

A kernel of one step computes what comes after the product with R. It has the pointers above, at its
step, and two more:

    terms  forward: R·h, (N, B, recurrent, D); backward: what R carries back from the step after this,
           (N, B, D); null at the first step of either, for zeros
    carry  (states, B, N, D), float32, read and then written: the states; backward, their gradients
           without what R carries and without states_grad
    before (backward) the states before the step; null: zeros
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Literal, NamedTuple

from scan_registry.base.frozen import dataclass
from scan_registry.base.strides import stride_names

Function = Literal["lstm", "gru", "elman", "slstm"]
Direction = Literal["forward", "backward"]
Scope = Literal["sequence", "step"]
#: What the public function accepts; here, as commands read it without torch.
RnnBackend = Literal["auto", "cuda", "cuda_fused", "cuda_alternating", "triton", "reference"]


@dataclass(frozen=True)
class Sizes:
    """How many gates and states a cell has, and what the gates are called.

    recurrent  gates that R feeds
    inputs     gates that Wx feeds
    gates      all pre-activations, in the order of the bias
    states     carried from step to step
    cache      values that a step keeps for the backward pass
    """

    recurrent: int
    inputs: int
    gates: tuple[str, ...]
    states: tuple[str, ...]
    cache: tuple[str, ...]

    @property
    def bias(self) -> int:
        return len(self.gates)


SIZES: Mapping[Function, Sizes] = {
    "lstm": Sizes(4, 4, ("i", "f", "z", "o"), ("h", "c"), ("i", "f", "z", "o")),
    "gru": Sizes(3, 3, ("g", "r", "z", "n"), ("h",), ("r", "z", "n", "g")),
    "elman": Sizes(1, 1, ("h",), ("h",), ()),
    "slstm": Sizes(4, 4, ("i", "f", "z", "o"), ("h", "c", "n", "m"), ("k", "f", "z", "o")),
}

#: The dtypes that kernels are built for.
DTYPES = ("bfloat16", "float16", "float32")

#: The tensors that have strides of their own, with those strides' names; the kernels' order.
STRIDED: Mapping[tuple[Scope, Direction], Mapping[str, tuple[str, ...]]] = {
    ("sequence", "forward"): {
        "inputs": ("batch", "time"),
        "states": ("state", "batch", "time"),
        "cache": ("batch", "time"),
    },
    ("sequence", "backward"): {
        "states": ("state", "batch", "time"),
        "cache": ("batch", "time"),
        "states_grad": ("state", "batch", "time"),
        "gates_grad": ("batch", "time"),
    },
    ("step", "forward"): {
        "inputs": ("batch",),
        "states": ("state", "batch"),
        "cache": ("batch",),
    },
    ("step", "backward"): {
        "before": ("state", "batch"),
        "states": ("state", "batch"),
        "cache": ("batch",),
        "states_grad": ("state", "batch"),
        "gates_grad": ("batch",),
    },
}


class Clips(NamedTuple):
    """What is clipped, symmetrically about zero; infinity for nothing.

    forward         h after each step, which is the last thing that a step does. Gradients pass
                    through as if it had not been clipped.
    recurrent       the gradient that R carries from one step to the one before
    recurrent_cut   that gradient is zero
    """

    forward: float = math.inf
    recurrent: float = math.inf
    recurrent_cut: bool = False


@dataclass(frozen=True)
class RnnProblem:
    """One direction of one recurrent network, over the whole sequence or over one step.

    scope      ``sequence``: R and all steps; ``step``: what comes after the product with R
    dtype      of every tensor but ``bias`` and a step's ``carry``, which are float32
    strides    in elements, of the tensors that ``STRIDED`` names
    graded     states that have a gradient: all of them, or h alone
    training   whether forward writes the cache
    alignment  bytes, at most 16, that divide the address and every stride of each tensor
    resets     whether a sequence's states start anew at some steps
    """

    scope: Scope
    direction: Direction
    function: Function
    dtype: str
    batch: int
    time: int
    heads: int
    dim: int
    strides: tuple[int, ...]
    graded: int = 0
    training: bool = False
    alignment: int = 16
    clips: Clips = Clips()
    resets: bool = False

    @property
    def kernel(self) -> str:
        return f"{self.scope}_{self.direction}"

    @property
    def sizes(self) -> Sizes:
        """Of its cell."""
        return SIZES[self.function]

    def scalars(self) -> dict[str, int]:
        """Every integer parameter of the kernels, by name; clips as the bits of a float32."""
        values = {
            **{name: getattr(self, name) for name in ("batch", "time", "heads", "dim", "graded")},
            "forward_clip": float_bits(self.clips.forward),
            "recurrent_clip": float_bits(0.0 if self.clips.recurrent_cut else self.clips.recurrent),
        }
        values |= dict(
            zip(stride_names(STRIDED[self.scope, self.direction]), self.strides, strict=True)
        )
        return values


def float_bits(value: float) -> int:
    """The bits of ``value`` as a float32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits
