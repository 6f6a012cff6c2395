"""A selective scan as numbers: what selection and launching need to know, and no tensor.

Tensors, S being sequences that are packed along time, or 1, and G groups of channels:

    u, delta, z, out, out_grad              (B, D, L), any strides
    u_grad, delta_grad, z_grad              (B, D, L), of one layout
    A                                       (D, N), float32
    B, C                                    (B, G, N, L), any strides
    D, delta_bias                           (D,), float32; null: zeros
    initial_state, final_state, final_grad, initial_grad
                                            (B, S, D, N), float32; null: zeros
    checkpoints                             (B, L // INTERVAL + S, D, N), float32: the states before every INTERVAL
                                            steps of each sequence
    A_grad, D_grad, bias_grad               (B, S, parts, D, N) and (B, S, parts, D), float32: summed over all but the
                                            channels by whoever asked for them
    adjoints, sizes                         likewise, what each part but a sequence's first hands on: made by the
                                            direction ``adjoint`` if there are several parts
    part_states, part_sizes                 likewise, what each part but a sequence's last hands on: made by the direction
                                            ``adjoint`` of a problem that is ``forwards``, as its adjoints and sizes, from
                                            u in place of out_grad, B in place of C, and no z
    B_grad, C_grad                          (CTAs of a group, B, G, N, L), float32: likewise

What is float32 here is in the dtype of no other tensor, and lies without gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from scan_registry.base.frozen import dataclass
from scan_registry.base.strides import stride_names
from scan_registry.kernels.model import ITEM_SIZE

Direction = Literal["forward", "adjoint", "backward"]
Layout = Literal["time_last", "channel_last"]

#: The dtypes that kernels are built for.
DTYPES = ("bfloat16", "float16", "float32")
DIRECTIONS: tuple[Direction, ...] = ("forward", "adjoint", "backward")
LAYOUTS: tuple[Layout, ...] = ("time_last", "channel_last")
#: Steps from one state that is kept for the backward pass to the next, which are its tile.
INTERVAL = 32
#: The most states of a channel.
MOST_STATES = 256
#: Channels of a warp, forwards and backwards.
WARP_CHANNELS = 16
#: Channels of a CTA of the forward pass whose warps take turns over time.
TURNS_CHANNELS = 8
#: Where that is faster on 132 SMs (notes/README.md): from so many steps on, and, by bytes of an element, for more rows than the
#: first number and at most the second. Rows are channels of all batches.
TURNS_TIME, TURNS_ROWS = 1000, {2: (2_640, 6_336), 4: (4_224, 6_336)}
#: States that the backward pass works on at a time; and warps of its CTAs, of one block of states and of several.
BLOCK_STATES, WARPS_OF_ONE, WARPS_OF_SEVERAL = 16, 4, 2
#: Floats that a thread of the backward pass keeps of each block of states, if there are several.
KEPT = 24

#: The tensors that have strides of their own, with those strides' names; the kernels' order.
_SEQUENCE = ("batch", "channel", "time")
_PROJECTION = ("batch", "group", "state", "time")
STRIDED: Mapping[Direction, Mapping[str, tuple[str, ...]]] = {
    "forward": {
        **dict.fromkeys(("u", "delta", "z", "out"), _SEQUENCE),
        **dict.fromkeys(("B", "C"), _PROJECTION),
    },
    "adjoint": {**dict.fromkeys(("delta", "z", "grad"), _SEQUENCE), "C": _PROJECTION},
    "backward": {
        **dict.fromkeys(("u", "delta", "z", "grad", "u_grad"), _SEQUENCE),
        **dict.fromkeys(("B", "C"), _PROJECTION),
    },
}


@dataclass(frozen=True)
class SelectiveScanProblem:
    """One direction of one selective scan.

    dtype      of u, delta, z, B, C, the output and its gradient
    layout     along which dimension lanes go
    sequences  that are packed along time; 0: they are not
    strides    in elements, of the tensors that ``STRIDED`` names; 0 for one that is not there
    aligned    whether the sequences of ``layout`` lie along it without gaps and start on 16 bytes everywhere, and
               consist of whole pieces of 16 bytes
    whole      the same of B and of C, along time
    parts      that a sequence is cut into along time
    forwards   whether the parts hand on states to later parts, not gradients to earlier ones; of direction ``adjoint``
    constant   whether B or C do not change with time, which no kernel takes
    """

    direction: Direction
    dtype: str
    layout: Layout
    batch: int
    channels: int
    time: int
    states: int
    groups: int
    strides: tuple[int, ...]
    softplus: bool = False
    sequences: int = 0
    aligned: bool = True
    whole: tuple[bool, bool] = (True, True)
    parts: int = 1
    forwards: bool = False
    constant: bool = False

    @property
    def kernel(self) -> str:
        return self.direction

    @property
    def group_channels(self) -> int:
        """Channels that share B and C."""
        return self.channels // self.groups

    @property
    def ctas_of_group(self) -> int:
        """CTAs of the backward pass that share a batch and a group, and a sequence's part."""
        return -(-self.group_channels // (WARP_CHANNELS * self._warps))

    @property
    def _warps(self) -> int:
        return WARPS_OF_ONE if self.states <= BLOCK_STATES else WARPS_OF_SEVERAL

    def parts_for(self, sms: int) -> int:
        """Parts to cut sequences into for the backward pass on a GPU of so many SMs: so many that its CTAs fill the GPU evenly,
        though to cut costs a seventh more."""
        ctas = self.ctas_of_group * self.groups * self.batch * max(1, self.sequences)
        return self._evenest(ctas, self.ctas_of_sm, 0.8, lambda parts: 1.15, sms)

    @property
    def takes_turns(self) -> bool:
        """Whether the forward pass is faster where warps take turns over time, on a GPU that has such a kernel."""
        along_time = (
            self.layout == "time_last" and self.aligned and all(self.whole) and not self.sequences
        )
        if not along_time or self.time < TURNS_TIME or self.states > BLOCK_STATES:
            return False
        more, most = TURNS_ROWS[ITEM_SIZE[self.dtype]]
        return more < self.batch * self.channels <= most

    def forward_parts_for(self, sms: int) -> int:
        """The same for the forward pass of up to 16 states, where to cut takes up to twice the time."""
        if self.sequences or self.states > BLOCK_STATES:
            return 1
        shared = self.aligned or self.dtype == "float32"  # by two warps: channels
        per_cta = 2 * WARP_CHANNELS if shared else 4 * WARP_CHANNELS
        ctas = -(-self.group_channels // per_cta) * self.groups * self.batch
        return self._evenest(ctas, 4 if shared else 3, 1.4, lambda parts: 2 - 0.7 / parts, sms)

    def _evenest(
        self, ctas: int, of_sm: int, alone: float, cost: Callable[[int], float], sms: int
    ) -> int:
        """The parts that take the least time. An SM that works on k CTAs at once takes ``alone`` + k for them, where up to
        ``of_sm`` fit (notes/README.md); and all parts together take ``cost`` times the work of one."""
        most = max(1, min(8, self.time // (4 * INTERVAL)))

        def duration(parts: int) -> float:
            waves, rest = divmod(ctas * parts, of_sm * sms)
            last = alone + -(-rest // sms) if rest else 0.0
            return (waves * (alone + of_sm) + last) / parts * (cost(parts) if parts > 1 else 1.0)

        return min(range(1, most + 1), key=duration)

    @property
    def ctas_of_sm(self) -> int:
        """CTAs of the backward pass that an SM of an H100 has room for."""
        return 3 if self.states <= BLOCK_STATES else 4

    @property
    def carried(self) -> int:
        """Floats of ``carries``, which a backward pass of more states than a block needs."""
        blocks = -(-self.states // BLOCK_STATES)
        ctas = self.ctas_of_group * self.groups * self.batch * max(1, self.sequences) * self.parts
        return 0 if blocks <= 1 else ctas * blocks * self._warps * 32 * KEPT

    def scalars(self) -> dict[str, int]:
        """Every integer parameter of the kernels, by name."""
        sizes = ("batch", "channels", "time", "states", "group_channels")
        values = {
            **{name: getattr(self, name) for name in sizes},
            "sequences": max(1, self.sequences),
            "parts": self.parts,
            "flags": self.softplus | self.whole[0] << 1 | self.whole[1] << 2 | self.forwards << 3,
        }
        return values | dict(zip(stride_names(STRIDED[self.direction]), self.strides, strict=True))
