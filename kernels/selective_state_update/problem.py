"""One step of a selective scan as numbers: what selection and launching need to know, and no tensor.

Tensors; without heads there is one, of stride 0:

    state          (slots, heads, channels, N)
    x, dt, z, out  (batch, heads, channels)
    A              (heads, channels, N)
    B, C           (batch, groups, N): a group has as many neighbouring rows, channels of a head, as every other
    D, bias        (heads, channels); null: zeros
    indices        (batch,), int32 or int64: the slots of batches; null: their own numbers
"""

from __future__ import annotations

from collections.abc import Mapping

from scan_registry.base.frozen import dataclass

#: Dtypes of states, and of all other tensors.
DTYPES = ("float32", "bfloat16", "float16")
#: The most states of a channel.
MOST_STATES = 256
#: The tensors that have a dtype of their own, in the order of the kernel's ``formats``; ``out`` has that of x.
FORMATTED = ("x", "dt", "A", "B", "C", "D", "z", "bias")

#: The dimensions of tensors, in the kernel's order.
_OF_BATCH, _OF_PROJECTION = ("batch", "head", "channel"), ("batch", "group", "state")
DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "state": ("slot", "head", "channel", "state"),
    **dict.fromkeys(("x", "dt", "z", "out"), _OF_BATCH),
    "A": ("head", "channel", "state"),
    **dict.fromkeys(("B", "C"), _OF_PROJECTION),
    **dict.fromkeys(("D", "bias"), ("head", "channel")),
    "indices": ("batch",),
}
STRIDES = tuple(f"{name}_{axis}" for name, axes in DIMENSIONS.items() for axis in axes)

_FORMATS = {name: number for number, name in enumerate(DTYPES)}


@dataclass(frozen=True)
class StepProblem:
    """One step of every batch.

    dtype         of the state
    slots         rows of the state
    dtypes        of the tensors that ``FORMATTED`` names; of one that is not there any
    strides       in elements, in the order of ``STRIDES``; 0 for a tensor that is not there
    aligned       whether the states of a channel lie without gaps, in whole chunks of 16 bytes, B and C so in chunks of
                  as many numbers, and A, too, if it has not one number for all states
    wide_indices  whether indices are int64
    """

    dtype: str
    batch: int
    heads: int
    channels: int
    states: int
    groups: int
    slots: int
    dtypes: tuple[str, ...]
    strides: tuple[int, ...]
    softplus: bool = False
    aligned: bool = True
    wide_indices: bool = False

    @property
    def kernel(self) -> str:
        return "step"

    @property
    def inputs(self) -> str:
        """The dtype of B and C, if they have the same; else nothing."""
        of = dict(zip(FORMATTED, self.dtypes, strict=True))
        return of["B"] if of["B"] == of["C"] else ""

    @property
    def decay(self) -> str:
        """The dtype of A."""
        return self.dtypes[FORMATTED.index("A")]

    @property
    def tied(self) -> bool:
        """Whether A has one number for all states of a channel."""
        return self.strides[STRIDES.index("A_state")] == 0

    @property
    def large(self) -> bool:
        """Whether a tensor but the state reaches past 2^31 elements."""
        sizes = {
            "batch": self.batch,
            "head": self.heads,
            "channel": self.channels,
            "state": self.states,
            "group": self.groups,
        }
        strides = dict(zip(STRIDES, self.strides, strict=True))
        return any(
            sum(sizes[axis] * abs(strides[f"{name}_{axis}"]) for axis in axes) >= 2**31
            for name, axes in DIMENSIONS.items()
            if name != "state"
        )

    @property
    def rows(self) -> int:
        """Channels of all heads."""
        return self.heads * self.channels

    def scalars(self) -> dict[str, int]:
        """The kernel's integer parameters by name, but for those of the launch."""
        formats = 0
        for place, dtype in enumerate(self.dtypes):
            formats |= _FORMATS[dtype] << (2 * place)
        return {
            "batches": self.batch,
            "heads": self.heads,
            "channels": self.channels,
            "states": self.states,
            "group_rows": self.rows // self.groups,
            "slots": self.slots,
            "formats": formats,
            "flags": self.softplus | self.wide_indices << 1,
            **dict(zip(STRIDES, self.strides, strict=True)),
        }
