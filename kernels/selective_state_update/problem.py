"""One step of a selective scan as numbers: what selection and launching need to know, and no tensor.

Tensors; without heads there is one, of stride 0:

    state          (slots, heads, channels, N)
    x, dt, z, out  (batch, heads, channels)
    A              (heads, channels, N)
    B, C           (batch, groups, N): a group has as many neighbouring rows, channels of a head, as every other
    D, bias        (heads, channels); null: zeros
    indices        (batch, columns), int32 or int64: the slots of batches; null: their own numbers

A batch is one sequence, and has one row of x, dt, z, B, C and out; or with cu_seqlens as many as it has tokens, from row
cu_seqlens[batch] on. What servers add, and what may be null, too:

    dst_state      (slots, heads, channels, N): where states are written, with the strides of the state but for slots
    dst_indices    (batch, columns): the slots to write to
    cu_seqlens     (batch + 1,), without gaps
    num_accepted   (batch,), without gaps: a batch starts from the slot in column num_accepted - 1 of its indices
    seed           (1,), int64, on which stochastic rounding depends
"""

from __future__ import annotations

from collections.abc import Mapping

from scan_registry.base.frozen import dataclass

#: Dtypes of states, and of all other tensors.
DTYPES = ("float32", "bfloat16", "float16")
#: The most states of a channel.
MOST_STATES = 256
#: Of problems that are ``dense``: the dtypes of the state and of inputs, and states of a row. Channels are a multiple of the rows of a
#: warp.
DENSE_DTYPES, DENSE_INPUTS, DENSE_STATES, DENSE_ROWS = ("float32", "bfloat16"), "bfloat16", 16, 64
#: The tensors that have a dtype of their own, in the order of the kernel's ``formats``; ``out`` has that of x.
FORMATTED = ("x", "dt", "A", "B", "C", "D", "z", "bias")

#: Those of them that change with each token.
INPUTS = ("x", "dt", "B", "C", "z")

#: The dimensions of tensors, in the kernel's order.
_OF_BATCH, _OF_PROJECTION = ("batch", "head", "channel"), ("batch", "group", "state")
DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "state": ("slot", "head", "channel", "state"),
    **dict.fromkeys(("x", "dt", "z", "out"), _OF_BATCH),
    "A": ("head", "channel", "state"),
    **dict.fromkeys(("B", "C"), _OF_PROJECTION),
    **dict.fromkeys(("D", "bias"), ("head", "channel")),
    **dict.fromkeys(("indices", "dst_indices"), ("batch", "token")),
    "dst_state": ("slot",),
}
STRIDES = tuple(f"{name}_{axis}" for name, axes in DIMENSIONS.items() for axis in axes)

_FORMATS = {name: number for number, name in enumerate(DTYPES)}


@dataclass(frozen=True)
class StepProblem:
    """One step of every batch.

    dtype         of the state
    slots         rows of the state
    dtypes        of the tensors that ``FORMATTED`` names; of one that is not there that of x
    strides       in elements, in the order of ``STRIDES``; 0 for a tensor that is not there
    aligned       whether the states of a channel lie without gaps, in whole chunks of 16 bytes, B and C so in chunks of
                  as many numbers, and A, too, if it has not one number for all states
    in_pieces     whether x, dt and z of each token lie without gaps, and in whole pieces of 16 bytes
    wide_indices  whether indices are int64
    dst_slots     rows of the state that is written; None: as of the state
    pad_slot      an index that stands for no slot, as those below zero do
    served        whether there is anything that servers add, or a pad_slot
    tokens        rows of x; None: as many as batches
    columns       of indices and dst_indices that have several
    every_token   whether the states after each token are written, to the slot in the token's column
    wide_others   whether dst_indices, cu_seqlens and num_accepted are int64
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
    in_pieces: bool = False
    wide_indices: bool = False
    dst_slots: int | None = None
    pad_slot: int = -1
    served: bool = False
    tokens: int | None = None
    columns: int = 1
    every_token: bool = False
    wide_others: tuple[bool, bool, bool] = (False, False, False)

    @property
    def kernel(self) -> str:
        if self.dense:
            return "dense_tokens" if self.served else "dense_step"
        return "step" if self.in_chunks and not self.served else "tokens"

    @property
    def dense(self) -> bool:
        """Whether rows are those of Mamba's blocks: of 16 states with numbers of A of their own, all one after the other.

        A batch of no slot has some slot's states loaded in place of its own, so there has to be one.
        """
        of = dict(zip(STRIDES, self.strides, strict=True))
        distances = of["state_channel"], of["A_channel"], of["out_channel"]
        return (
            self.in_chunks
            and self.in_pieces
            and not self.tied
            and self.dtype in DENSE_DTYPES
            and self.inputs == DENSE_INPUTS
            and self.heads == self.groups == 1
            and self.slots > 0
            and self.channels % DENSE_ROWS == 0
            and (self.states, *distances) == (DENSE_STATES, DENSE_STATES, DENSE_STATES, 1)
        )

    @property
    def in_chunks(self) -> bool:
        """Whether kernels read it in chunks of 16 bytes: there are some for states with inputs of their own dtype, and for states
        of float32 with others."""
        inputs = DTYPES if self.dtype == "float32" else (self.dtype,)
        static = self.inputs in inputs and (self.tied or self.decay == "float32")
        return static and self.aligned and not self.large

    @property
    def inputs(self) -> str:
        """The dtype of x, dt, B, C and z, if they have the same; else nothing."""
        of = dict(zip(FORMATTED, self.dtypes, strict=True))
        dtypes = {of[name] for name in INPUTS}
        return of["x"] if len(dtypes) == 1 else ""

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
            "batch": self.rows_of_inputs,
            "head": self.heads,
            "channel": self.channels,
            "state": self.states,
            "group": self.groups,
        }
        strides = dict(zip(STRIDES, self.strides, strict=True))
        return any(
            sum(sizes[axis] * abs(strides[f"{name}_{axis}"]) for axis in axes) >= 2**31
            for name, axes in DIMENSIONS.items()
            if name not in ("state", "indices", "dst_state", "dst_indices")
        )

    @property
    def rows_of_inputs(self) -> int:
        """Tokens of all batches."""
        return self.batch if self.tokens is None else self.tokens

    @property
    def rows(self) -> int:
        """Channels of all heads."""
        return self.heads * self.channels

    @property
    def sections(self) -> int:
        """Parts of all rows that have one head and one group each."""
        return max(self.heads, self.groups)

    def scalars(self) -> dict[str, int]:
        """The kernel's integer parameters by name, but for those of the launch."""
        formats = 0
        for place, dtype in enumerate(self.dtypes):
            formats |= _FORMATS[dtype] << (2 * place)
        wide = sum(bit << place for place, bit in enumerate((self.wide_indices, *self.wide_others)))
        return {
            "batches": self.batch,
            "tokens": self.rows_of_inputs,
            "heads": self.heads,
            "channels": self.channels,
            "states": self.states,
            "group_rows": self.rows // self.groups,
            "slots": self.slots,
            "dst_slots": self.slots if self.dst_slots is None else self.dst_slots,
            "pad_slot": self.pad_slot,
            "columns": self.columns,
            "formats": formats,
            "flags": self.softplus | wide << 1 | self.every_token << 5,
            **dict(zip(STRIDES, self.strides, strict=True)),
        }
