"""A state space dual scan as numbers: what selection and launching need to know, and no tensor.

Sequences are cut into chunks of ``CHUNK`` steps. Chunk k of sequence s is slot ``cu_seqlens[s] // CHUNK + s + k`` of
``T // CHUNK + sequences``; where nothing is packed, a row of the batch is one sequence from 0 to T. Tensors, with S sequences, H heads,
G groups, P the size of a head and N states:

    x, z, out_grad                    (batch, T, H, P), in the problem's dtype; z null: no gate. out_grad is of what z gates
    dt                                (batch, T, H), in that dtype or float32, any strides
    B, C                              (batch, T, G, N), in that dtype
    A, D, dt_bias                     (H,), float32, or D (H, P); null: zeros, but for A
    seq_idx, cu_seqlens               (batch, T) and (S + 1,), int32; null: one sequence
    initial_state, final_state, final_grad, initial_grad
                                      (batch, S, H, P, N), float32; null: zeros, or not asked for
    out, ungated                      (batch, T, H, P), in the problem's dtype: the output, and what z gates, null: not asked for
    x_grad                            (batch, T, H, P), in that dtype
    states                            (batch, slots, H, P, N), in that dtype: the state before each chunk; null: not asked for
    sequence_decays                   (batch, S, H), float32: the product of a sequence's decays; null if not asked for
    adjoints                          likewise: the gradient of the state after each chunk
    dt_grad                           (batch, T, H), float32
    head_grads                        (3, batch, slots, H), float32: terms of the gradients of A, D and dt_bias, zeros in slots that
                                      hold no step; those of D are of one number a head
    B_grad, C_grad                    (splits, batch, T, G, N), float32; if splits is 1, in the problem's dtype

Gradients are summed over slots and splits by whoever asked for them.

x, B, C, z and out_grad have a last dimension of stride 1, and start on 16 bytes everywhere. Others but dt lie without gaps.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Literal

from scan_registry.base.frozen import dataclass
from scan_registry.base.strides import stride_names

Direction = Literal["forward", "states", "adjoint", "backward"]

#: The dtypes that kernels are built for.
DTYPES = ("float32", "bfloat16", "float16")
#: A forward pass runs the first one, a backward pass the others.
DIRECTIONS: tuple[Direction, ...] = ("forward", "states", "adjoint", "backward")
#: Steps of a chunk, and numbers of a head that a tile has.
CHUNK, SIZE = 64, 64
#: States of a tile of the backward pass, where shared memory allows and where it does not.
BLOCK, SMALL_BLOCK = 128, 64
#: Bytes of shared memory that a CTA of the backward pass wants for large blocks of states, with one stage.
SHARED_OF_BLOCK = 130_048
#: The largest head and the most states, and what both are multiples of, as rows are moved by 16 bytes.
MOST_SIZE, MOST_STATES, PIECE = 128, 256, 8
#: Elements from one step, head or group to the next; offsets within a chunk are counted in 32 bits.
MOST_STRIDE = 2**25

_HEADS, _GROUPS = ("batch", "time", "head"), ("batch", "time", "group")
#: The tensors that have strides of their own, with those strides' names; the kernels' order.
STRIDED: Mapping[Direction, Mapping[str, tuple[str, ...]]] = {
    "states": {"x": _HEADS, "dt": _HEADS, "B": _GROUPS},
    "forward": {"x": _HEADS, "dt": _HEADS, "B": _GROUPS, "C": _GROUPS, "z": _HEADS},
    "adjoint": {"dt": _HEADS, "C": _GROUPS, "grad": _HEADS},
    "backward": {"x": _HEADS, "dt": _HEADS, "B": _GROUPS, "C": _GROUPS, "grad": _HEADS},
}


def block_of(state_size: int, dtype: str, shared_memory: int) -> int:
    """The states that a CTA of the backward pass takes at a time, on a GPU with so much shared memory per block."""
    large = state_size > SMALL_BLOCK and shared_memory >= SHARED_OF_BLOCK
    return BLOCK if large and dtype != "float32" else SMALL_BLOCK


def most_heads(dtype: str) -> int:
    """The heads that a CTA of the backward pass has memory for."""
    return 16 if dtype == "float32" else 32


@dataclass(frozen=True)
class SSDScanProblem:
    """One direction of one scan.

    dtype       of x, B, C, the output and its gradient
    head_size   P
    state_size  N
    strides     in elements, of the tensors that ``STRIDED`` names; zeros without z
    has_z       whether there is a z, in the direction ``forward``
    softplus    of the step sizes, before the limits ``low`` and ``high``
    wide_dt     whether dt is float32
    wide_D      whether D has a number for each channel
    sequences   that are packed along time; 0: they are not
    splits      of a group's heads, each of which adds up gradients of B and C, in the direction ``backward``
    block       states that a CTA of that direction works on at a time
    """

    direction: Direction
    dtype: str
    batch: int
    time: int
    heads: int
    groups: int
    head_size: int
    state_size: int
    strides: tuple[int, ...]
    has_z: bool = False
    softplus: bool = False
    wide_dt: bool = False
    wide_D: bool = False
    low: float = 0.0
    high: float = math.inf
    sequences: int = 0
    splits: int = 1
    block: int = BLOCK

    @property
    def kernel(self) -> str:
        return self.direction

    @property
    def gated(self) -> bool:
        """Whether there is what most calls do not have: z, or D of (H, P)."""
        return self.has_z or self.wide_D

    @property
    def slots(self) -> int:
        """Of chunks, in each row of the batch."""
        return self.time // CHUNK + max(1, self.sequences)

    @property
    def group_heads(self) -> int:
        """Heads that share B and C."""
        return self.heads // self.groups

    @property
    def split_heads(self) -> int:
        """Heads of a split, in the direction ``backward``."""
        return -(-self.group_heads // self.splits)

    @property
    def short_strides(self) -> tuple[int, ...]:
        """Those of steps, heads and groups."""
        names = stride_names(STRIDED[self.direction])
        return tuple(
            stride
            for name, stride in zip(names, self.strides, strict=True)
            if not name.endswith("_batch") and not name.startswith("dt_")
        )

    def scalars(self) -> dict[str, int]:
        """Every integer parameter of the kernels, by name."""
        values = {
            "batch": self.batch,
            "time": self.time,
            "heads": self.heads,
            "groups": self.groups,
            "head_size": self.head_size,
            "state_size": self.state_size,
            "sequences": max(1, self.sequences),
            "slots": self.slots,
            "splits": self.splits,
            "D_channel": int(self.wide_D),
            "flags": self.softplus | self.wide_dt << 1,
            "dt_low": float_bits(self.low),
            "dt_high": float_bits(self.high),
        }
        return values | dict(zip(stride_names(STRIDED[self.direction]), self.strides, strict=True))


def float_bits(number: float) -> int:
    """The bits of a number in float32, as an integer; what exceeds float32 is infinite."""
    try:
        packed = struct.pack("<f", number)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, number))
    return int.from_bytes(packed, "little")
