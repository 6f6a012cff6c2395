"""What a gated scan poses to the kernels: problems, made of tensors, and which tensors are copied first.

Kernels need one dimension of unit stride, time or channels, the same in every sequence, and inputs that share their
strides. The states lie as a new tensor like the first input does, which decides the dimension. Arguments are as
``normalised`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scan_registry.base.frozen import dataclass
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.problem import (
    STRIDED,
    Direction,
    GatedScanProblem,
    Layout,
    Strides,
)
from scan_registry.ops.gated_scan_arguments import COMPILED, Arguments, Options
from scan_registry.ops.problems import StateLayout, as_new

#: Memory that a copy may take for the sake of the others' strides, in sizes of the tensor.
_MOST_ROOM = 2

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class KernelCall:
    """One kernel's part in an operator's call: its problem, and the names of what is copied first.

    inputs  strides of copies of inputs, in the order of the tensors' own dimensions
    dense   strides of what the kernel writes, and of copies of states and their gradient, likewise
    direct  whether a new tensor like the first input has the strides ``dense``
    """

    problem: GatedScanProblem
    copied: tuple[str, ...] = ()
    inputs: Sizes = (0, 0, 0)
    dense: Sizes = (0, 0, 0)
    direct: bool = True

    def alternatives(self, backend: Backend) -> tuple[tuple[GatedScanProblem, Backend], ...]:
        """The problem alone."""
        return ((self.problem, backend),)

    def fused(self) -> None:
        """No kernel of this family does what another one does, too."""


def has_kernels(given: Arguments, options: Options) -> bool:
    """Whether kernels of this family compute it. Gates that are given, and hold throughout, are ``linear_scan``'s."""
    first = given.inputs[0]
    return first.dtype in COMPILED and first.numel() > 0 and not is_linear(given, options)


def is_linear(given: Arguments, options: Options) -> bool:
    """Whether it is what ``linear_scan`` computes."""
    return options.kind == "linear" and given.reset is None


def addresses_of(tensors: Sequence[Tensor | None]) -> int:
    """How far the addresses of all tensors are aligned, as the plans' cache tells calls apart."""
    found = 0
    for tensor in tensors:
        found |= 0 if tensor is None else tensor.data_ptr()
    return found & 15


def ordered(values: Sequence[int], dim: int) -> Sizes:
    """From the order of the tensors' dimensions to batch, channels, time, and back."""
    batch, one, other = values
    return (batch, one, other) if dim == -1 else (batch, other, one)


def make_call(
    direction: Direction,
    given: Arguments,
    options: Options,
    addresses: int,
    others: Mapping[str, Tensor] | None = None,
) -> KernelCall:
    """A pass over the arguments, and backwards over ``others``, which are ``states`` and ``states_grad``. ``addresses`` say
    how far all are aligned, up to 16 bytes."""
    first, dim = given.inputs[0], options.dim
    sizes = ordered(first.shape, dim)
    promised = ordered(as_new(first).stride(), dim)
    layout = _layout(sizes, promised)
    whole = promised
    if layout is None:  # batches are innermost
        layout, whole = "time_last", (sizes[1] * sizes[2], sizes[2], 1)
    dense = _plain(whole, sizes, layout)
    inputs = {f"input{n}": _own(x, dim, layout) for n, x in enumerate(given.inputs)}
    shared = _shared([*inputs.values()], dense, sizes, layout)
    copied = [name for name, own in inputs.items() if own != shared]
    strides = {"inputs": shared, "states": dense, "states_grad": dense, "grads": dense}
    for name, tensor in (others or {}).items():
        own = _own(tensor, dim, layout)
        if _has_unit(own, sizes, layout):
            strides[name] = own
        else:
            copied.append(name)
    kind, bounds, reset = KINDS[options.kind], given.cu_seqlens, given.reset
    named = {name: Strides(0, *each) for name, each in strides.items()}
    named["state"] = _state_strides(StateLayout.of(first, dim, bounds), dim)
    problem = GatedScanProblem(
        direction=direction,
        layout=layout,
        dtype=(dtype := str(first.dtype).removeprefix("torch.")),
        gates_dtype=dtype,
        outer=1,
        batch=sizes[0],
        channels=sizes[1],
        time=sizes[2],
        strides=tuple(named[name] for name in STRIDED[direction]),
        alignment=16 if addresses == 0 else addresses & -addresses,
        sequences=0 if bounds is None else bounds.shape[0] - 1,
        reverse=options.reverse,
        kind=kind.source,
        option=kind.option,
        resets=reset is not None,
        reset_batch=_reset_batch(reset),
    )
    return KernelCall(
        problem, tuple(copied), ordered(shared, dim), ordered(whole, dim), whole == promised
    )


def _layout(sizes: Sizes, strides: Sizes) -> Layout | None:
    """The dimension of unit stride, of several that have it the one of more than one element; None if there is none."""
    (_, channels, time), (_, of_channel, of_time) = sizes, strides
    if of_time == 1 and (time > 1 or channels == 1):
        return "time_last"
    return "channel_last" if of_channel == 1 or channels == 1 else None


def _own(tensor: Tensor, dim: int, layout: Layout) -> Sizes:
    return _plain(ordered(tensor.stride(), dim), ordered(tensor.shape, dim), layout)


def _plain(strides: Sizes, sizes: Sizes, layout: Layout) -> Sizes:
    """The same wherever it makes no difference: strides of dimensions of one element."""
    unit = 2 if layout == "time_last" else 1
    batch, channel, time = (
        stride if size > 1 else int(place == unit)
        for place, (stride, size) in enumerate(zip(strides, sizes, strict=True))
    )
    return batch, channel, time


def _has_unit(strides: Sizes, sizes: Sizes, layout: Layout) -> bool:
    unit = 2 if layout == "time_last" else 1
    return sizes[unit] == 1 or strides[unit] == 1


def _shared(own: Sequence[Sizes], dense: Sizes, sizes: Sizes, layout: Layout) -> Sizes:
    """The strides that inputs are to have: those of most of them, or dense ones, whatever copies the fewest."""

    def copies(strides: Sizes) -> int:
        return sum(each != strides for each in own)

    fitting = [
        strides
        for strides in dict.fromkeys((dense, *own))
        if _has_unit(strides, sizes, layout)
        and (copies(strides) == 0 or strides == dense or _has_room(strides, sizes))
    ]
    return min(fitting, key=copies)


def _has_room(strides: Sizes, sizes: Sizes) -> bool:
    """Whether a tensor of such strides can be written, and has few gaps."""
    end = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride < end:
                return False
            end = (size - 1) * stride + end
    return end <= _MOST_ROOM * sizes[0] * sizes[1] * sizes[2]


def _state_strides(room: StateLayout, dim: int) -> Strides:
    if room.packed:
        batch, channel, sequence = ordered(room.strides, dim)
        return Strides(0, batch, channel, sequence)
    batch, channel = room.strides
    return Strides(0, batch, channel, 0)


def reset_is_dense(reset: Tensor | None) -> bool:
    """Whether neighbouring bytes are neighbours in time."""
    return reset is None or reset.shape[1] == 1 or reset.stride(1) == 1


def _reset_batch(reset: Tensor | None) -> int:
    """From batch to batch, of a dense reset or a dense copy."""
    if reset is None or reset.shape[0] == 1:
        return 0
    return reset.stride(0) if reset_is_dense(reset) else reset.shape[1]


def describe(given: Arguments, options: Options, differentiated: bool) -> dict[str, KernelCall]:
    """The problems of a call by direction; those of derivatives only if it is ``differentiated``. Nothing is computed."""
    if given.inputs[0].numel() == 0:
        return {}
    addresses = addresses_of(aligned_reset(given).flat)
    model = torch.empty_like(given.inputs[0], device="meta")
    calls = {"forward": make_call("forward", given, options, addresses)}
    if differentiated:
        others = {"states": model, "states_grad": model}
        calls["backward"] = make_call("backward", given, options, addresses, others)
    return calls


def aligned_reset(given: Arguments) -> Arguments:
    """With a reset that starts on 16 bytes: it is small, and its address is not to count for the others."""
    reset = given.reset
    if reset is None or reset.data_ptr() & 15 == 0:
        return given
    return given._replace(reset=reset.clone())
